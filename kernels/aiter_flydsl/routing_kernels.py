# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""`routing.routing` as one launch: as torch operators it takes as long as AITER's own kernels for one token."""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import to_f32
from moe_compile.kernels.triton.routing_kernels import local_expert


@triton.jit(do_not_specialize=["num_tokens"])
def routing_kernel(
    ids_ptr,  # (T, TOP_K) int32 or int64
    weights_ptr,  # (T, TOP_K), any float dtype
    expert_map_ptr,  # (NUM_IDS,) or None
    out_ids_ptr,  # (T, TOP_K + 1) int32
    out_weights_ptr,  # (T, TOP_K + 1) float32
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above TOP_K
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(T / BLOCK),)."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, COLUMNS)
    inside = tokens < num_tokens
    slots = tokens[:, None] * TOP_K + columns[None, :]
    taken = inside[:, None] & (columns < TOP_K)[None, :]
    local = local_expert(ids_ptr, slots, taken, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    kept = local >= 0
    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for k in range(TOP_K):
        other = local_expert(ids_ptr, tokens * TOP_K + k, inside, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
        weight = to_f32(tl.load(weights_ptr + tokens * TOP_K + k, mask=inside, other=0.0))
        same = local == other[:, None]
        total += tl.where(same, weight[:, None], 0.0)
        kept = kept & ((columns[None, :] <= k) | (local != other[:, None]))
    written = tokens[:, None] * (TOP_K + 1) + columns[None, :]
    valid = inside[:, None] & (columns <= TOP_K)[None, :]
    tl.store(out_ids_ptr + written, tl.where(kept, local, NUM_EXPERTS), mask=valid)
    tl.store(out_weights_ptr + written, tl.where(kept, total, 0.0), mask=valid)
