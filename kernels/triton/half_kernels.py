# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""What surrounds the two half_gemm kernels: sorting and converting the input, the gate function, the weighted sum."""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import e4m3_to_f32, e8m0_to_f32, half_exponent, power_of_two, round_to, to_f32
from moe_compile.kernels.triton.gate import apply_gate
from moe_compile.kernels.triton.overlap import wait_for_previous_kernel
from moe_compile.kernels.triton.quantize_kernels import quantize_blocks
from moe_compile.kernels.triton.routing_kernels import local_expert, sort_slots


@triton.jit
def store_half(x, half_ptr, scale_ptr, row, K: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr):
    """One row, float32 (BLOCK,) with zeros behind K, as float16 and the power of two that it is to be multiplied by.

    The largest finite element comes to lie in [2**14, 2**15). What is 2**-28 of it or less loses digits; a float32 sum
    of the row would not keep them either.
    """
    if QUANTIZED:
        value, byte = quantize_blocks(tl.reshape(x, (BLOCK // 32, 32)))
        x = tl.reshape(e4m3_to_f32(value) * e8m0_to_f32(byte)[:, None], (BLOCK,))
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = half_exponent(tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=0))
    half = (x * power_of_two(141 - exponent)).to(tl.float16)
    k = tl.arange(0, BLOCK)
    tl.store(half_ptr + row * K + k, half, mask=k < K)
    tl.store(scale_ptr + row, power_of_two(exponent - 141))


@triton.jit(do_not_specialize=["num_sorting", "num_slots", "num_blocks", "num_tails"])
def prepare_kernel(
    x_ptr,  # (T, H), any float dtype
    half_ptr,  # (T, H) float16, out
    scale_ptr,  # (T,) float32, out
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    sorted_slots_ptr,  # out, as the tables below: see routing_kernels.sort_slots
    block_expert_ptr,
    block_count_ptr,
    tail_slots_ptr,
    tail_expert_ptr,
    tail_count_ptr,
    num_sorting,
    num_slots,
    num_blocks,
    num_tails,
    H: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    SORT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sort the slots (the first num_sorting programs) and convert the hidden states. Grid: (num_sorting + T,)."""
    wait_for_previous_kernel(OVERLAP)
    program = tl.program_id(0)
    if SORT:
        if program < num_sorting:
            sort_slots(
                program,
                ids_ptr,
                expert_map_ptr,
                sorted_slots_ptr,
                block_expert_ptr,
                block_count_ptr,
                tail_slots_ptr,
                tail_expert_ptr,
                tail_count_ptr,
                num_slots,
                num_blocks,
                num_tails,
                NUM_EXPERTS,
                NUM_IDS,
                E_PAD,
                S_PAD,
                CHUNK,
                BLOCK_M,
                TAIL_M,
            )
        else:
            convert_row(program - num_sorting, x_ptr, half_ptr, scale_ptr, H, BLOCK, QUANTIZED)
    else:
        convert_row(program, x_ptr, half_ptr, scale_ptr, H, BLOCK, QUANTIZED)


@triton.jit
def convert_row(row, x_ptr, half_ptr, scale_ptr, H: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr):
    row = row.to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = to_f32(tl.load(x_ptr + row * H + k, mask=k < H, other=0.0))
    store_half(x, half_ptr, scale_ptr, row, H, BLOCK, QUANTIZED)


@triton.jit(do_not_specialize=["num_slots"])
def activate_kernel(
    partials_ptr,  # (SPLIT_K, S, 2I) float32; (SPLIT_K, S, I) without GATED
    bias_ptr,  # (E, 2I) or None
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    half_ptr,  # (S, I) float16, out
    scale_ptr,  # (S,) float32, out
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr,
    UP_SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``act(gate, up)`` of one slot, rounded to DTYPE, then stored as float16 with a scale. Grid: (S,)."""
    wait_for_previous_kernel(OVERLAP)
    slot = tl.program_id(0).to(tl.int64)
    expert = local_expert(ids_ptr, slot, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS).to(tl.int64)
    if expert < 0:
        return
    ROWS: tl.constexpr = 2 * I if GATED else I
    n = tl.arange(0, BLOCK)
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        row = partials_ptr + (split * num_slots + slot) * ROWS + n
        gate += tl.load(row, mask=n < I, other=0.0)
        if GATED:
            up += tl.load(row + I, mask=n < I, other=0.0)
    if bias_ptr is not None:
        bias = bias_ptr + expert * ROWS + n
        gate += to_f32(tl.load(bias, mask=n < I, other=0.0))
        if GATED:
            up += to_f32(tl.load(bias + I, mask=n < I, other=0.0))
    out = apply_gate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP)
    out = tl.where(n < I, to_f32(round_to(out, DTYPE)), 0.0)
    store_half(out, half_ptr, scale_ptr, slot, I, BLOCK, QUANTIZED)


@triton.jit(do_not_specialize=["num_slots"])
def sum_kernel(
    partials_ptr,  # (SPLIT_K, S, H) float32 or float16, by slot; rows of slots without an expert hold anything
    partials_scale_ptr,  # (S, ceil(H/64)) float32 if the partials are float16 (then SPLIT_K is 1), else None
    bias_ptr,  # (E, H) or None
    ids_ptr,  # (T, TOP_K)
    weights_ptr,  # (T, TOP_K), any float dtype
    expert_map_ptr,  # (NUM_IDS,) or None
    out_ptr,  # (T, H)
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``out[t] = sum_k topk_weights[t, k] * (partials[t, k] + bias[e])``, k rising. Grid: (T, ceil(H / BLOCK))."""
    wait_for_previous_kernel(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        expert = local_expert(ids_ptr, slot, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS).to(tl.int64)
        end = tl.where(expert >= 0, H, 0)
        partial = tl.zeros((BLOCK,), dtype=tl.float32)
        for split in tl.static_range(SPLIT_K):
            partial += tl.load(partials_ptr + (split * num_slots + slot) * H + h, mask=h < end, other=0.0).to(
                tl.float32
            )
        if partials_scale_ptr is not None:
            scale_ptrs = partials_scale_ptr + slot * ((H + 63) // 64) + h // 64
            partial *= tl.load(scale_ptrs, mask=h < end, other=0.0)
        if bias_ptr is not None:
            partial += to_f32(tl.load(bias_ptr + tl.where(expert >= 0, expert, 0) * H + h, mask=h < end, other=0.0))
        weight = tl.where(expert >= 0, to_f32(tl.load(weights_ptr + slot)), 0.0)
        total += weight * partial
    tl.store(out_ptr + token * H + h, round_to(total, out_ptr.dtype.element_ty), mask=h < H)
