# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, attr-defined"
"""The kernels: quantise, gate and up projection, down projection, weighted sum. One wave a workgroup, no LDS memory.

A tile is 16 slots of one expert against 32 rows of its weights. The weights are the first operand of the MFMA, so a
lane ends with four neighbouring columns of one slot, and four lanes hold all 32 values that share one scale.
"""

# No postponed annotations: FlyDSL reads them.
import flydsl.compiler as flyc
import flydsl.expr as fx

from moe_compile.kernels.flydsl import device
from moe_compile.kernels.flydsl.limits import BLOCK, LANES

COLUMNS = BLOCK  # of the result, of one tile


@flyc.kernel
def quantize_kernel(x: fx.Pointer, values: fx.Pointer, scales: fx.Pointer, words: fx.Int32, dtype: fx.Constexpr[str]):
    """``words`` groups of 8 elements of ``dtype`` to E4M3 and E8M0 bytes; a thread a group. Grid: ceil(words / 64)."""
    word = fx.Int32(fx.block_idx.x) * fx.Int32(LANES) + fx.Int32(fx.thread_idx.x)
    inside = word < words
    clamped = inside.select(word, words - fx.Int32(1))
    loaded = device.load(x, fx.Int64(clamped) * fx.Int64(8), getattr(fx, dtype), 8)
    numbers = [fx.Float32(loaded[index]) for index in fx.range_constexpr(8)]
    byte = device.scale_byte(device.exchange_largest(device.amax_bits(numbers), (1, 2)))
    low, high = device.pack4(numbers[:4], byte), device.pack4(numbers[4:], byte)
    if inside:
        device.store(low, values, word * fx.Int32(2))
        device.store(high, values, word * fx.Int32(2) + fx.Int32(1))
        if word % fx.Int32(4) == fx.Int32(0):
            device.store(fx.Uint8(byte), scales, word // fx.Int32(4))


@flyc.kernel
def gate_up_kernel(
    x: fx.Pointer,
    x_scale: fx.Pointer,
    w: fx.Pointer,
    w_scale: fx.Pointer,
    block_expert: fx.Pointer,
    block_slots: fx.Pointer,
    out: fx.Pointer,
    out_scale: fx.Pointer,
    h: fx.Constexpr[int],
    i: fx.Constexpr[int],
    top_k: fx.Constexpr[int],
    direct: fx.Constexpr[bool],
    alpha: fx.Constexpr[float],
    limit: fx.Constexpr[float],
    limit_after: fx.Constexpr[bool],
    up_offset: fx.Constexpr[float],
):
    """(slots, I) MXFP8 of ``act(gate, up)``. Grid: (I / 32, blocks of 16 slots)."""
    lane = fx.Int32(fx.thread_idx.x)
    row, group = lane % fx.Int32(16), lane // fx.Int32(16)
    column, block = fx.Int32(fx.block_idx.x), fx.Int32(fx.block_idx.y)
    expert = device.load(block_expert, block, fx.Int32)
    if expert >= fx.Int32(0):
        slot, source = _slot(block_slots, block, row, direct)
        token = source // fx.Int32(top_k)
        first = fx.Int64(expert) * fx.Int64(2 * i) + fx.Int64(column * fx.Int32(COLUMNS) + row)
        rows = [first + fx.Int64(offset) for offset in (0, 16, i, i + 16)]
        totals = _product(w, w_scale, rows, x, x_scale, fx.Int64(token), group, h)
        results = []
        for half in fx.range_constexpr(2):
            gate, up = totals[half].load(), totals[half + 2].load()
            results += [
                device.apply_gate(gate[index], up[index], alpha, limit, limit_after, up_offset)
                for index in fx.range_constexpr(4)
            ]
        byte = device.scale_byte(device.exchange_largest(device.amax_bits(results), (16, 32)))
        low, high = device.pack4(results[:4], byte), device.pack4(results[4:], byte)
        if slot >= fx.Int32(0):
            word = fx.Int64(slot) * fx.Int64(i // 4) + fx.Int64(column * fx.Int32(COLUMNS // 4) + group)
            device.store(low, out, word)
            device.store(high, out, word + fx.Int64(4))
            if group == fx.Int32(0):
                device.store(fx.Uint8(byte), out_scale, fx.Int64(slot) * fx.Int64(i // 32) + fx.Int64(column))


@flyc.kernel
def down_kernel(
    z: fx.Pointer,
    z_scale: fx.Pointer,
    w: fx.Pointer,
    w_scale: fx.Pointer,
    block_expert: fx.Pointer,
    block_slots: fx.Pointer,
    out: fx.Pointer,
    h: fx.Constexpr[int],
    i: fx.Constexpr[int],
    direct: fx.Constexpr[bool],
):
    """(slots, H) float32, not weighted. Grid: (H / 32, blocks of 16 slots)."""
    lane = fx.Int32(fx.thread_idx.x)
    row, group = lane % fx.Int32(16), lane // fx.Int32(16)
    column, block = fx.Int32(fx.block_idx.x), fx.Int32(fx.block_idx.y)
    expert = device.load(block_expert, block, fx.Int32)
    if expert >= fx.Int32(0):
        slot, source = _slot(block_slots, block, row, direct)
        first = fx.Int64(expert) * fx.Int64(h) + fx.Int64(column * fx.Int32(COLUMNS) + row)
        totals = _product(w, w_scale, [first, first + fx.Int64(16)], z, z_scale, fx.Int64(source), group, i)
        if slot >= fx.Int32(0):
            target = fx.Int64(slot) * fx.Int64(h) + fx.Int64(column * fx.Int32(COLUMNS) + group * fx.Int32(4))
            for half in fx.range_constexpr(2):
                values = totals[half].load()
                for index in fx.range_constexpr(4):
                    device.store(values[index], out, target + fx.Int64(half * 16 + index))


def _slot(block_slots, block, row, direct):
    """The slot of the lane's row of the tile, -1 for none, and the slot whose activations it reads."""
    if direct:
        return (row == fx.Int32(0)).select(block, fx.Int32(-1)), block
    slot = device.load(block_slots, block * fx.Int32(16) + row, fx.Int32)
    return slot, (slot < fx.Int32(0)).select(fx.Int32(0), slot)


def _product(w, w_scale, rows, x, x_scale, x_row, group, k):
    """Registers of ``w[row] . x[x_row]`` for 16 rows from each of ``rows`` on, 16 rows of ``x``, over all of K."""
    mfma = fx.make_mma_atom(fx.rocdl.cdna4.MFMA_Scale(16, 16, device.STEP, fx.Float8E4M3FN, fx.Float8E4M3FN))
    totals = [fx.make_rmem_tensor(4, fx.Float32) for _ in rows]
    for total in totals:
        total.fill(0)

    def accumulate(step):
        b = device.operand(x, x_row, step, group, k)
        b_scale = device.scale(x_scale, x_row, step, group, k)
        for total, row in zip(totals, rows, strict=True):
            a = device.operand(w, row, step, group, k)
            a_scale = device.scale(w_scale, row, step, group, k)
            fx.gemm(mfma, total, a, b, total, scale_a=a_scale, scale_b=b_scale)

    whole = k // device.STEP
    for step in range(whole):
        accumulate(step)
    if k % device.STEP:
        accumulate(whole)
    return totals


@flyc.kernel
def reduce_kernel(
    partials: fx.Pointer,
    local_ids: fx.Pointer,
    weights: fx.Pointer,
    out: fx.Pointer,
    h: fx.Constexpr[int],
    top_k: fx.Constexpr[int],
    dtype: fx.Constexpr[str],
):
    """``out[t] = sum_k weights[t, k] * partials[t, k]``, k rising. Grid: (ceil(H / 64), T)."""
    h_index = fx.Int32(fx.block_idx.x) * fx.Int32(LANES) + fx.Int32(fx.thread_idx.x)
    token = fx.Int32(fx.block_idx.y)
    if h_index < fx.Int32(h):
        total = fx.Float32(0.0)
        for k in fx.range_constexpr(top_k):
            slot = token * fx.Int32(top_k) + fx.Int32(k)
            routed = device.load(local_ids, slot, fx.Int32) >= fx.Int32(0)
            partial = device.load(partials, fx.Int64(slot) * fx.Int64(h) + fx.Int64(h_index), fx.Float32)
            weight = device.load(weights, slot, fx.Float32)
            total = total + routed.select(weight * partial, fx.Float32(0.0))
        device.store(total.to(getattr(fx, dtype)), out, fx.Int64(token) * fx.Int64(h) + fx.Int64(h_index))
