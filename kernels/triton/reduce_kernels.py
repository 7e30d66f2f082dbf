# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The weighted sum over the experts of a token."""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import round_to, to_f32
from moe_compile.kernels.triton.routing_kernels import local_expert


@triton.jit
def reduce_kernel(
    partials_ptr,  # (S, H) float32, by slot; rows of slots without an expert hold anything
    ids_ptr,  # (T, TOP_K)
    weights_ptr,  # (T, TOP_K), any float dtype
    expert_map_ptr,  # (NUM_IDS,) or None
    out_ptr,  # (T, H)
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[t] = sum_k topk_weights[t, k] * partials[t, k]`` in float32, k rising. Grid: (T, ceil(H / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(TOP_K):
        slot = token * TOP_K + k
        routed = local_expert(ids_ptr, slot, True, expert_map_ptr, NUM_EXPERTS, NUM_IDS) >= 0
        partial = tl.load(partials_ptr + slot * H + h, mask=h < tl.where(routed, H, 0), other=0.0)
        weight = tl.where(routed, to_f32(tl.load(weights_ptr + slot)), 0.0)
        total += weight * partial
    tl.store(out_ptr + token * H + h, round_to(total, out_ptr.dtype.element_ty), mask=h < H)
