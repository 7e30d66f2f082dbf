# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""float32 hidden states: both grouped GEMMs over slots sorted by expert. (Narrower ones: half_gemm.)

A program computes BLOCK_N weight rows for BLOCK_M slots of one expert. The product is transposed, ``acc (BLOCK_N,
BLOCK_M) = W (BLOCK_N, K) @ x.T (K, BLOCK_M)``: the weights are the operand with many rows, so that a few tokens fill a
matrix instruction. DOT says in which type the operands meet:

- ``fp32``: float32 products (no TF32).
- ``bf16``: activations that are MXFP8 are exact in bfloat16, and so are decoded weights.
"""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import (
    decode_columns,
    decode_rows,
    dot,
    round_to,
    to_f32,
)
from moe_compile.kernels.triton.gate import apply_gate


@triton.jit
def load_x(x_ptr, x_scale_ptr, rows, row_mask, k0, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """x.T as (BLOCK_K, BLOCK_M) in its own dtype, or decoded to bfloat16 if there are scales; rows are int64."""
    k = k0 + tl.arange(0, BLOCK_K)
    mask = row_mask[None, :]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[:, None]
    x = tl.load(x_ptr + rows[None, :] * K + k[:, None], mask=mask, other=0)
    if x_scale_ptr is None:
        return x
    else:
        SCALES: tl.constexpr = (K + 31) // 32
        blocks = k0 // 32 + tl.arange(0, BLOCK_K // 32)
        mask = row_mask[None, :] & (blocks < SCALES)[:, None]
        scale = tl.load(x_scale_ptr + rows[None, :] * SCALES + blocks[:, None], mask=mask, other=127)
        return round_to(decode_columns(x, scale, BLOCK_K, BLOCK_M), tl.bfloat16)


@triton.jit
def accumulate(
    acc,
    x,
    w_ptr,
    w_scale_ptr,
    rows_left,
    k0,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """``acc + W[:BLOCK_N, k0 : k0 + BLOCK_K] @ x``; the pointers are at the tile's first row."""
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
    if DOT == "bf16":
        acc = dot(round_to(decode_rows(w, scale, BLOCK_N, BLOCK_K), tl.bfloat16), x, acc)
    else:
        acc = dot(decode_rows(w, scale, BLOCK_N, BLOCK_K), to_f32(x), acc)
    return acc


@triton.jit(do_not_specialize=["num_blocks"])
def gate_up_kernel(
    x_ptr,  # (T, H) float, or E4M3 bytes
    x_scale_ptr,  # (T, ceil(H/32)) E8M0 bytes, or None
    w_ptr,  # (E, 2I, H) E4M3 bytes; (E, I, H) without GATED
    w_scale_ptr,  # (E, 2I, ceil(H/32))
    bias_ptr,  # (E, 2I) or None
    out_ptr,  # (S, I), by slot
    sorted_slots_ptr,  # this and the block tables: see routing_kernels.place_kernel
    block_expert_ptr,
    block_count_ptr,
    num_blocks,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOP_K: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    """``out[slot] = act(gate[e] @ x[t], up[e] @ x[t])``. Grid: (num_blocks * ceil(I / BLOCK_N),).

    Blocks of one expert are neighbours in the grid and read the same weight rows.
    """
    block = tl.program_id(0) % num_blocks
    n0 = tl.program_id(0) // num_blocks * BLOCK_N
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    in_block = m < tl.load(block_count_ptr + block)
    slots = tl.load(sorted_slots_ptr + block * BLOCK_M + m, mask=in_block, other=0).to(tl.int64)
    tokens = slots // TOP_K

    ROWS: tl.constexpr = 2 * I if GATED else I
    SCALES: tl.constexpr = (H + 31) // 32
    EVEN_N: tl.constexpr = I % BLOCK_N == 0
    gate_row = expert * ROWS + n0
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k0 in range(0, H, BLOCK_K):
        x = load_x(x_ptr, x_scale_ptr, tokens, in_block, k0, H, BLOCK_M, BLOCK_K)
        w = w_ptr + gate_row * H
        w_scale = w_scale_ptr + gate_row * SCALES
        gate = accumulate(gate, x, w, w_scale, I - n0, k0, H, BLOCK_N, BLOCK_K, DOT, EVEN_N)
        if GATED:
            w += I * H
            w_scale += I * SCALES
            up = accumulate(up, x, w, w_scale, I - n0, k0, H, BLOCK_N, BLOCK_K, DOT, EVEN_N)

    n = tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias = bias_ptr + gate_row + n
        gate += to_f32(tl.load(bias, mask=n < I - n0, other=0.0))[:, None]
        if GATED:
            up += to_f32(tl.load(bias + I, mask=n < I - n0, other=0.0))[:, None]
    out = apply_gate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP)
    out_ptrs = out_ptr + slots[:, None] * I + n0 + n[None, :]
    mask = in_block[:, None] & (n < I - n0)[None, :]
    tl.store(out_ptrs, round_to(tl.trans(out), out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def down_kernel(
    x_ptr,  # (S, I) float, or E4M3 bytes, by slot
    x_scale_ptr,  # (S, ceil(I/32)) E8M0 bytes, or None
    w_ptr,  # (E, H, I) E4M3 bytes
    w_scale_ptr,  # (E, H, ceil(I/32))
    bias_ptr,  # (E, H) or None
    out_ptr,  # (S, H) float32, by slot
    sorted_slots_ptr,
    block_expert_ptr,
    block_count_ptr,
    num_blocks,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[slot] = down[e] @ x[slot]``. Grid: (num_blocks * ceil(H / BLOCK_N),)."""
    block = tl.program_id(0) % num_blocks
    n0 = tl.program_id(0) // num_blocks * BLOCK_N
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    in_block = m < tl.load(block_count_ptr + block)
    slots = tl.load(sorted_slots_ptr + block * BLOCK_M + m, mask=in_block, other=0).to(tl.int64)

    SCALES: tl.constexpr = (I + 31) // 32
    EVEN_N: tl.constexpr = H % BLOCK_N == 0
    w_row = expert * H + n0
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k0 in range(0, I, BLOCK_K):
        x = load_x(x_ptr, x_scale_ptr, slots, in_block, k0, I, BLOCK_M, BLOCK_K)
        w = w_ptr + w_row * I
        w_scale = w_scale_ptr + w_row * SCALES
        acc = accumulate(acc, x, w, w_scale, H - n0, k0, I, BLOCK_N, BLOCK_K, DOT, EVEN_N)

    n = tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc += to_f32(tl.load(bias_ptr + w_row + n, mask=n < H - n0, other=0.0))[:, None]
    out_ptrs = out_ptr + slots[:, None] * H + n0 + n[None, :]
    tl.store(out_ptrs, tl.trans(acc), mask=in_block[:, None] & (n < H - n0)[None, :])
