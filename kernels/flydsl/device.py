# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Pieces of the kernels: addresses, MXFP8 operands of the scaled MFMA, rounding to MXFP8, the gate function.

``v_mfma_scale_f32_16x16x128_f8f6f4``: lane ``l`` holds row ``l % 16`` of either operand; its 32 elements are two runs
of 16, at ``16 * (l // 16)`` and 64 further on; its scale byte is that of the block of 32 number ``l // 16``; its four
results are rows ``4 * (l // 16) + i`` of the first operand against row ``l % 16`` of the second.
"""

import flydsl.expr as fx

STEP = 128  # elements of K in one MFMA
LOG2_E = 1.4426950408889634


def load(pointer, offset, dtype, count=1):
    """``count`` consecutive elements from element ``offset`` (any integer) on."""
    address = fx.add_offset(pointer, fx.Int64(offset))
    return fx.ptr_load(address, dtype if count == 1 else fx.Vector[dtype, count])


def store(value, pointer, offset):
    fx.ptr_store(value, fx.add_offset(pointer, fx.Int64(offset)))


def operand(words_pointer, row, step, group, k):
    """One lane's 32 E4M3 elements of step ``step`` (a Python integer) of a row; zero beyond K."""
    registers = fx.make_rmem_tensor(8, fx.Int32)
    runs = []
    for run in (0, 64):
        word = group * fx.Int32(4) + fx.Int32((step * STEP + run) // 4)
        tail = step * STEP + STEP > k
        inside = word < fx.Int32(k // 4)
        if tail:
            word = inside.select(word, fx.Int32(0))
        words = load(words_pointer, row * fx.Int64(k // 4) + fx.Int64(word), fx.Int32, 4)
        runs += [inside.select(words[index], fx.Int32(0)) if tail else words[index] for index in range(4)]
    registers.store(fx.Vector.from_elements(runs, fx.Int32))
    return registers


def scale(bytes_pointer, row, step, group, k):
    """The lane's scale byte. Beyond K that of the row's first block, which changes nothing: it scales zeros."""
    block = group + fx.Int32(step * (STEP // 32))
    if step * STEP + STEP > k:
        block = (block < fx.Int32(k // 32)).select(block, fx.Int32(0))
    return fx.Int32(load(bytes_pointer, row * fx.Int64(k // 32) + fx.Int64(block), fx.Uint8))


def amax_bits(values):
    """The largest magnitude as bits of a float32: NaN and infinity are the largest."""
    largest = fx.Int32(0)
    for value in values:
        bits = value.bitcast(fx.Int32) & fx.Int32(0x7FFFFFFF)
        largest = (bits > largest).select(bits, largest)
    return largest


def exchange_largest(bits, offsets):
    """The largest over the lanes whose numbers differ by ``offsets`` (powers of two)."""
    for offset in offsets:
        other = fx.gpu.shuffle_xor(bits, offset, 64)
        bits = (other > bits).select(other, bits)
    return bits


def scale_byte(amax):
    """127 + ceil(log2(amax / 448)), at least 0; 255 if something is not finite."""
    byte = ((amax + fx.Int32(0x1FFFFF)) >> fx.Int32(23)) - fx.Int32(8)
    byte = (byte < fx.Int32(0)).select(fx.Int32(0), byte)
    return (amax >= fx.Int32(0x7F800000)).select(fx.Int32(255), byte)


def pack4(values, byte):
    """Four float32 as E4M3 under the scale of ``byte``, to nearest even, in one word."""
    finite = (byte == fx.Int32(255)).select(fx.Int32(0), byte)
    inverse = ((fx.Int32(254) - finite) << fx.Int32(23)).bitcast(fx.Float32)
    scaled = [value * inverse for value in values]
    word = fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, scaled[0], scaled[1], fx.Int32(0), False)
    word = fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, scaled[2], scaled[3], word, True)
    return fx.Int32(word)


def apply_gate(gate, up, alpha, limit, limit_after, up_offset):
    """`GateFunction` of silu in float32; ``limit`` 0 is none. Clamps are selects: minimum and maximum drop NaN."""
    if limit and not limit_after:
        gate = (gate > fx.Float32(limit)).select(fx.Float32(limit), gate)
    # The instructions themselves: fx.math would call into the bitcode library of ROCm.
    power = fx.Float32(fx.rocdl.exp2(fx.Float32.ir_type, (gate * fx.Float32(-alpha * LOG2_E)).ir_value()))
    out = gate * fx.Float32(fx.rocdl.rcp(fx.Float32.ir_type, power + fx.Float32(1.0)))
    if limit and limit_after:
        out = (out > fx.Float32(limit)).select(fx.Float32(limit), out)
    if limit:
        up = (up > fx.Float32(limit)).select(fx.Float32(limit), up)
        up = (up < fx.Float32(-limit)).select(fx.Float32(-limit), up)
    return out * (up + fx.Float32(up_offset))
