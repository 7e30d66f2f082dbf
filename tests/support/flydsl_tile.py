"""The smallest block-scaled product in FlyDSL: one wave per 16 x 16 tile, operands straight from memory.

It holds what a kernel has to know of ``v_mfma_scale_f32_16x16x128_f8f6f4``: lane ``l`` holds row ``l % 16`` of either
operand; its 32 elements are two runs of 16, at ``16 * (l // 16)`` and 64 further on; its scale byte is that of the
block of 32 number ``l // 16``; its four results are rows ``4 * (l // 16) + i`` of column ``l % 16``.
"""

# No postponed annotations: FlyDSL reads them.
import flydsl.compiler as flyc
import flydsl.expr as fx

WORDS = 1 << 28  # of the widest view that a buffer descriptor reaches
BYTES = 1 << 30


@flyc.kernel
def scaled_tile(
    a: fx.Tensor, b: fx.Tensor, a_scale: fx.Tensor, b_scale: fx.Tensor, out: fx.Tensor, k: fx.Constexpr[int]
):
    lane = fx.Int32(fx.thread_idx.x)
    row_tile, column_tile, _ = fx.block_idx
    row, group = lane % 16, lane // 16

    def flat(tensor, dtype, count):
        view = fx.make_view(fx.recast_iter(dtype, fx.get_iter(tensor)), fx.make_layout(count, 1))
        return fx.logical_divide(fx.rocdl.make_buffer_tensor(fx.Tensor(view)), fx.make_layout(1, 1))

    copy_16_bytes = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Int32)
    copy_1_byte = fx.make_copy_atom(fx.rocdl.BufferCopy8b(), fx.Int8)

    def load_words(source, word):
        registers = fx.make_rmem_tensor(4, fx.Int32)
        fx.copy(copy_16_bytes, fx.slice(source, (None, word)), registers)
        return registers.load()

    def operand(source, source_row, step):
        word = source_row * (k // 4) + step * 32 + group * 4
        registers = fx.make_rmem_tensor(8, fx.Int32)
        registers.store(load_words(source, word).shuffle(load_words(source, word + 16), list(range(8))))
        return registers

    def scale(source, source_row, step):
        register = fx.make_rmem_tensor(1, fx.Int8)
        fx.copy(copy_1_byte, fx.slice(source, (None, source_row * (k // 32) + step * 4 + group)), register)
        return fx.Int32(register.load()[0]) & fx.Int32(255)

    a_words, b_words = flat(a, fx.Int32, WORDS), flat(b, fx.Int32, WORDS)
    a_bytes, b_bytes = flat(a_scale, fx.Int8, BYTES), flat(b_scale, fx.Int8, BYTES)
    mfma = fx.make_mma_atom(fx.rocdl.cdna4.MFMA_Scale(16, 16, 128, fx.Float8E4M3FN, fx.Float8E4M3FN))
    total = fx.make_rmem_tensor(4, fx.Float32)
    total.fill(0)
    a_row, b_row = row_tile * 16 + row, column_tile * 16 + row
    for step in fx.range_constexpr(k // 128):
        fx.gemm(
            mfma,
            total,
            operand(a_words, a_row, step),
            operand(b_words, b_row, step),
            total,
            scale_a=scale(a_bytes, a_row, step),
            scale_b=scale(b_bytes, b_row, step),
        )
    values = total.load()
    for index in fx.range_constexpr(4):
        out[row_tile * 16 + group * 4 + index, column_tile * 16 + row] = values[index]


@flyc.jit
def launch(
    a: fx.Tensor,
    b: fx.Tensor,
    a_scale: fx.Tensor,
    b_scale: fx.Tensor,
    out: fx.Tensor,
    row_tiles: fx.Int32,
    column_tiles: fx.Int32,
    k: fx.Constexpr[int],
    stream: fx.Stream = fx.Stream(None),  # noqa: B008  # evaluated by FlyDSL as the null stream
):
    scaled_tile(a, b, a_scale, b_scale, out, k).launch(
        grid=(row_tiles, column_tiles, 1), block=(64, 1, 1), stream=stream
    )
