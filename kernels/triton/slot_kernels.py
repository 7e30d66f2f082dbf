# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Few tokens: one matrix-vector product per slot, without sorting. All arithmetic is float32, whatever the dtypes."""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import decode_rows, round_to, to_f32
from moe_compile.kernels.triton.gate import apply_gate
from moe_compile.kernels.triton.routing_kernels import local_expert


@triton.jit
def load_vector(x_ptr, x_scale_ptr, k0, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(1, BLOCK_K) float32, decoded if there are scales, 0 behind K."""
    k = (k0 + tl.arange(0, BLOCK_K))[None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0)
    if x_scale_ptr is None:
        return to_f32(x)
    else:
        blocks = (k0 // 32 + tl.arange(0, BLOCK_K // 32))[None, :]
        scale = tl.load(x_scale_ptr + blocks, mask=blocks < (K + 31) // 32, other=127)
        return decode_rows(x, scale, 1, BLOCK_K)


@triton.jit
def load_weights(
    w_ptr,
    w_scale_ptr,
    rows_left,
    k0,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """(BLOCK_N, BLOCK_K) float32, 0 outside; the pointers are at the tile's first row."""
    SCALES: tl.constexpr = (K + 31) // 32
    n = tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    blocks = k0 // 32 + tl.arange(0, BLOCK_K // 32)
    w_ptrs = w_ptr + n[:, None] * K + k[None, :]
    scale_ptrs = w_scale_ptr + n[:, None] * SCALES + blocks[None, :]
    if EVEN_N and K % BLOCK_K == 0:
        w = tl.load(w_ptrs)
        scale = tl.load(scale_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n < rows_left)[:, None] & (k < K)[None, :], other=0)
        scale = tl.load(scale_ptrs, mask=(n < rows_left)[:, None] & (blocks < SCALES)[None, :], other=127)
    return decode_rows(w, scale, BLOCK_N, BLOCK_K)


@triton.jit
def gate_up_slot_kernel(
    x_ptr,  # (T, H) float, or E4M3 bytes
    x_scale_ptr,  # (T, ceil(H/32)) E8M0 bytes, or None
    w_ptr,  # (E, 2I, H) E4M3 bytes; (E, I, H) without GATED
    w_scale_ptr,  # (E, 2I, ceil(H/32))
    bias_ptr,  # (E, 2I) or None
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    out_ptr,  # (S, I), by slot
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr,
    UP_SOFTCAP: tl.constexpr,
):
    """``out[slot] = act(gate[e] @ x[t], up[e] @ x[t])``. Grid: (S, ceil(I / BLOCK_N))."""
    slot = tl.program_id(0).to(tl.int64)
    n0 = tl.program_id(1) * BLOCK_N
    expert = local_expert(ids_ptr, slot, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS).to(tl.int64)
    if expert < 0:
        return
    ROWS: tl.constexpr = 2 * I if GATED else I
    SCALES: tl.constexpr = (H + 31) // 32
    EVEN_N: tl.constexpr = I % BLOCK_N == 0
    token = slot // TOP_K
    if x_scale_ptr is not None:
        x_scale_ptr += token * SCALES
    gate_row = expert * ROWS + n0
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k0 in range(0, H, BLOCK_K):
        x = load_vector(x_ptr + token * H, x_scale_ptr, k0, H, BLOCK_K)
        w = w_ptr + gate_row * H
        w_scale = w_scale_ptr + gate_row * SCALES
        gate += load_weights(w, w_scale, I - n0, k0, H, BLOCK_N, BLOCK_K, EVEN_N) * x
        if GATED:
            w += I * H
            w_scale += I * SCALES
            up += load_weights(w, w_scale, I - n0, k0, H, BLOCK_N, BLOCK_K, EVEN_N) * x

    n = tl.arange(0, BLOCK_N)
    gate = tl.sum(gate, axis=1)
    up = tl.sum(up, axis=1)
    if bias_ptr is not None:
        bias = bias_ptr + gate_row + n
        gate += to_f32(tl.load(bias, mask=n < I - n0, other=0.0))
        if GATED:
            up += to_f32(tl.load(bias + I, mask=n < I - n0, other=0.0))
    out = apply_gate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP)
    tl.store(out_ptr + slot * I + n0 + n, round_to(out, out_ptr.dtype.element_ty), mask=n < I - n0)


@triton.jit
def down_slot_kernel(
    x_ptr,  # (S, I) float, or E4M3 bytes, by slot
    x_scale_ptr,  # (S, ceil(I/32)) E8M0 bytes, or None
    w_ptr,  # (E, H, I) E4M3 bytes
    w_scale_ptr,  # (E, H, ceil(I/32))
    bias_ptr,  # (E, H) or None
    ids_ptr,  # (T, TOP_K)
    weights_ptr,  # (T, TOP_K), any float dtype
    expert_map_ptr,  # (NUM_IDS,) or None
    out_ptr,  # (T, H)
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[t] = sum_k topk_weights[t, k] * down[e] @ x[slot]``, k rising. Grid: (T, ceil(H / BLOCK_N))."""
    token = tl.program_id(0).to(tl.int64)
    n0 = tl.program_id(1) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    SCALES: tl.constexpr = (I + 31) // 32
    EVEN_N: tl.constexpr = H % BLOCK_N == 0
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for j in range(TOP_K):
        slot = token * TOP_K + j
        expert = local_expert(ids_ptr, slot, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS).to(tl.int64)
        if expert >= 0:
            w_row = expert * H + n0
            x_scale = x_scale_ptr
            if x_scale_ptr is not None:
                x_scale = x_scale_ptr + slot * SCALES
            acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
            for k0 in range(0, I, BLOCK_K):
                x = load_vector(x_ptr + slot * I, x_scale, k0, I, BLOCK_K)
                w = w_ptr + w_row * I
                w_scale = w_scale_ptr + w_row * SCALES
                acc += load_weights(w, w_scale, H - n0, k0, I, BLOCK_N, BLOCK_K, EVEN_N) * x
            result = tl.sum(acc, axis=1)
            if bias_ptr is not None:
                result += to_f32(tl.load(bias_ptr + w_row + n, mask=n < H - n0, other=0.0))
            total += to_f32(tl.load(weights_ptr + slot)) * result
    tl.store(out_ptr + token * H + n0 + n, round_to(total, out_ptr.dtype.element_ty), mask=n < H - n0)
