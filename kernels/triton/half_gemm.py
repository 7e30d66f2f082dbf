# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The grouped GEMM behind both projections: MXFP8 weights times float16 activations, float32 sums.

Everything is float16 because that is the cheapest form of an E4M3 element (one conversion for two of them on sm_89 and
later, against three instructions an element in bfloat16), and decoding is what limits these kernels. Neither operand
fits its range by itself, so both come relative to a power of two per row, which multiplies the sums at the end:

- activations: half_kernels stores each row as float16 with its largest element near 2**14 and the power in float32;
- weights: an element is used as ``element * 2**(byte - base + 7)``, where ``base`` is the largest scale byte of the row
  (of this program's part of K). 448 * 2**7 is the most that float16 holds, and the products are exact down to 2**-21 of
  the row's largest scale. A block with a smaller scale counts as zero: its elements are below what a float32 sum of the
  row keeps.

The product is transposed, ``acc (BLOCK_N, BLOCK_M) = W (BLOCK_N, K) @ x.T (K, BLOCK_M)``: the weights are the operand
with many rows, so that a few tokens fill a matrix instruction, and they are decoded where that instruction reads them.
"""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import dot, e4m3_to_f16, half_exponent, power_of_two, relative_scales
from moe_compile.kernels.triton.overlap import wait_for_previous_kernel
from moe_compile.kernels.triton.routing_kernels import local_expert


@triton.jit
def largest_scales(
    scale_ptr,
    row_mask,
    SCALES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(BLOCK_N,) int32: the largest byte of each row among COUNT blocks; the pointer is at the first."""
    CHUNK: tl.constexpr = 64 if COUNT >= 64 else triton.next_power_of_2(COUNT)
    n = tl.arange(0, BLOCK_N)
    block = tl.arange(0, CHUNK)
    base = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for first in tl.static_range(0, COUNT, CHUNK):
        mask = row_mask[:, None] & (first + block < COUNT)[None, :]
        byte = tl.load(scale_ptr + n[:, None] * SCALES + (first + block)[None, :], mask=mask, other=0)
        base = tl.maximum(base, tl.max(byte.to(tl.int32), axis=1))
    return base


@triton.jit(do_not_specialize=["num_blocks", "num_slots"])
def half_gemm_kernel(
    x_ptr,  # (rows, K) float16
    x_scale_ptr,  # (rows,) float32, powers of two
    w_ptr,  # (E, N, K) E4M3 bytes
    w_scale_ptr,  # (E, N, ceil(K/32)) E8M0 bytes
    out_ptr,  # (SPLIT_K, S, N) float32 or float16, by slot; slots without an expert are not written
    out_scale_ptr,  # (S, ceil(N/64)) float32 powers of two for 64 columns each if out is float16, else None
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    sorted_slots_ptr,  # (num_blocks, BLOCK_M), see routing_kernels; None: block b is slot b alone
    block_expert_ptr,
    block_count_ptr,
    num_blocks,
    num_slots,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,  # row of x = slot // SLOTS_PER_ROW
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    HARDWARE: tl.constexpr,
    WAIT: tl.constexpr,  # for the previous kernel before it reads the "tables" or "x", or at the "end"
    OVERLAP: tl.constexpr,
):
    """``out[s, slot] = W[e][:, K_s] @ x[row][K_s]``, K in SPLIT_K parts. Grid: (num_blocks * ceil(N/BLOCK_N), SPLIT_K).

    Blocks of one expert are neighbours in the grid and read the same weight rows.
    """
    block = tl.program_id(0) % num_blocks
    n0 = tl.program_id(0) // num_blocks * BLOCK_N
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    if sorted_slots_ptr is None:
        expert = local_expert(ids_ptr, block, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS).to(tl.int64)
        in_block = m < 1
        slots = tl.where(in_block, block, 0).to(tl.int64)
    else:
        if WAIT == "tables":
            wait_for_previous_kernel(OVERLAP)
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        in_block = m < tl.load(block_count_ptr + block)
        slots = tl.load(sorted_slots_ptr + block * BLOCK_M + m)
        slots = tl.where(in_block, slots, 0).to(tl.int64)
    if expert < 0:
        # Here too: the end of this kernel must mean that all earlier ones have ended.
        if WAIT != "tables":
            wait_for_previous_kernel(OVERLAP)
        return
    rows = slots // SLOTS_PER_ROW

    SCALES: tl.constexpr = (K + 31) // 32
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = PART * SPLIT_K == K
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    blocks = tl.arange(0, BLOCK_K // 32)
    row_mask = n < N - n0
    first_k = split * PART
    w_ptrs = w_ptr + (expert * N + n0) * K + first_k + n[:, None] * K + k[None, :]
    first_scale = w_scale_ptr + (expert * N + n0) * SCALES + split * (PART // 32)
    # A copy into shared memory, and so one that runs ahead of the loop, moves at least 4 bytes: two steps' scales.
    TWO_STEPS: tl.constexpr = EVEN_N and BLOCK_K == 64 and PART % 128 == 0 and EVEN_K
    if TWO_STEPS:
        scale_ptrs = first_scale + n[:, None] * SCALES + tl.arange(0, 4)[None, :]
    else:
        scale_ptrs = first_scale + n[:, None] * SCALES + blocks[None, :]
    x_ptrs = x_ptr + rows[:, None] * K + first_k + k[None, :]

    if EVEN_K:
        base = largest_scales(first_scale, row_mask, SCALES, PART // 32, BLOCK_N)
    else:
        base = largest_scales(w_scale_ptr + (expert * N + n0) * SCALES, row_mask, SCALES, SCALES, BLOCK_N)
    offset = tl.broadcast_to((22 - base)[:, None], (BLOCK_N, BLOCK_K // 32))
    if WAIT == "x":
        wait_for_previous_kernel(OVERLAP)
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, PART, BLOCK_K):
        if EVEN_K and BLOCK_M >= 128:
            x = tl.load(x_ptrs + k0)  # row 0 for the slots behind the count; masks would cost registers
        elif EVEN_K:
            x = tl.load(x_ptrs + k0, mask=in_block[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k0, mask=in_block[:, None] & (first_k + k0 + k < K)[None, :], other=0.0)
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs + k0)
            if TWO_STEPS:
                both = tl.reshape(tl.load(scale_ptrs + k0 // 128 * 4), (BLOCK_N, 2, 2))
                even, odd = tl.split(tl.permute(both, (0, 2, 1)))
                scale = tl.where(k0 % 128 == 0, even, odd)
            else:
                scale = tl.load(scale_ptrs + k0 // 32)
        else:
            w = tl.load(w_ptrs + k0, mask=row_mask[:, None] & (first_k + k0 + k < K)[None, :], other=0)
            in_row = ((first_k + k0) // 32 + blocks < SCALES)[None, :]
            scale = tl.load(scale_ptrs + k0 // 32, mask=row_mask[:, None] & in_row, other=0)
        factor = relative_scales(scale, offset, HARDWARE)
        factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, BLOCK_K // 32, 32))
        w = e4m3_to_f16(w, HARDWARE) * tl.reshape(factor, (BLOCK_N, BLOCK_K))
        if WEIGHTS_FIRST:
            acc = dot(w, tl.trans(x), acc)
        else:
            acc = dot(x, tl.trans(w), acc)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)

    # Read again: kept through the loop, they would cost registers of the largest tiles. (Small tiles have enough, and
    # took 1.3 times as long with this: M3 TP4, T = 16.)
    if sorted_slots_ptr is not None and BLOCK_M >= 128:
        in_block = m < tl.load(block_count_ptr + block)
        slots = tl.where(in_block, tl.load(sorted_slots_ptr + block * BLOCK_M + m), 0).to(tl.int64)
        rows = slots // SLOTS_PER_ROW
    # Powers of two: exact. Activations first: their product with weights below 2**16 is the smaller number.
    acc = acc * tl.load(x_scale_ptr + rows, mask=in_block, other=0.0)[:, None]
    exponent = base - (7 + 127)
    acc = acc * power_of_two(exponent // 2)[None, :] * power_of_two(exponent - exponent // 2)[None, :]
    acc = tl.where((base == 255)[None, :], float("nan"), acc)
    if out_scale_ptr is not None:
        magnitude = acc.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        exponent = half_exponent(tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1))
        acc = acc * power_of_two(141 - exponent)[:, None]
        for group in tl.static_range(BLOCK_N // 64):
            scale_ptrs = out_scale_ptr + slots * ((N + 63) // 64) + n0 // 64 + group
            tl.store(scale_ptrs, power_of_two(exponent - 141), mask=in_block & (n0 + group * 64 < N))
    out_ptrs = out_ptr + (split.to(tl.int64) * num_slots + slots)[:, None] * N + n0 + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_block[:, None] & row_mask[None, :])
    if WAIT == "end":
        wait_for_previous_kernel(OVERLAP)
