"""One expert block with the FlyDSL kernels: which launches, on which tensors. Never run on hardware so far.

Both GEMMs read activations rounded to MXFP8 and the packed weights as they lie::

    hidden (T, H) -> quantize -> gate_up -> MXFP8 intermediate (S, I) -> down -> partials (S, H) fp32 -> reduce -> out

No sum is added in an order that may change: equal inputs give equal bits. Grids depend on shapes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError
from moe_compile.kernels.flydsl import launch, limits
from moe_compile.kernels.flydsl.launch import Launch
from moe_compile.kernels.flydsl.routing import Tiles, max_tiles, tiles_of
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

_MAX_TILES = 65535  # of the second dimension of a grid


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    *,
    expert_map: Tensor | None = None,
    activations: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``out[t] = sum_k topk_weights[t, k] * down[e] @ act(gate[e] @ x[t], up[e] @ x[t])``, as `reference.experts`.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32; rounded to MXFP8.
        topk_ids: (T, K) int32 or int64. Ids below 0 or from E on (or mapped to -1) contribute exactly zero.
        topk_weights: (T, K), a float dtype.
        packed: canonical MXFP8 weights without biases; H and I multiples of 32.
        gate: silu with any alpha, limit and up_offset.
        expert_map: (global experts,) int32 or int64, global id -> index into ``packed``, -1 for "not here".
        activations: ``auto`` or ``mxfp8``.
        out_dtype: bfloat16, float16 or float32; the dtype of ``hidden_states`` if None.

    Returns:
        (T, H), contiguous, aliasing no input.

    Raises:
        ExpertInputError: something that these kernels cannot run.
        GraphCaptureError: a graph is being captured, and a kernel has not been loaded before.
    """
    out_dtype = hidden_states.dtype if out_dtype is None else out_dtype
    _check(hidden_states, topk_ids, packed, gate, activations, out_dtype)
    tokens, top_k = topk_ids.shape
    if tokens == 0 or top_k == 0 or 0 in (packed.num_experts, packed.hidden_size, packed.intermediate_size):
        return hidden_states.new_zeros(hidden_states.shape, dtype=out_dtype)
    out = torch.empty(hidden_states.shape, dtype=out_dtype, device=hidden_states.device)
    tiles = tiles_of(topk_ids, expert_map, packed.num_experts)
    weights = topk_weights.float().contiguous()
    launch.execute(_plan(out, hidden_states.contiguous(), tiles, weights, packed, gate), hidden_states.device)
    return out


def _plan(
    out: Tensor, hidden: Tensor, tiles: Tiles, weights: Tensor, packed: PackedExperts, gate: GateFunction
) -> list[Launch]:
    """The launches that compute ``out``, in order."""
    tokens, top_k = weights.shape
    slots, h, i = tokens * top_k, packed.hidden_size, packed.intermediate_size
    x, x_scale = _mxfp8(hidden, tokens, h)
    z, z_scale = _mxfp8(hidden, slots, i)
    partials = torch.empty((slots, h), dtype=torch.float32, device=hidden.device)
    order = (("Int32", tiles.expert), ("Int32", tiles.slots))
    groups = tokens * h // 8
    limit = 0.0 if gate.limit is None else float(gate.limit)
    constants = (float(gate.alpha), limit, gate.limit_after, float(gate.up_offset))
    return [
        Launch(
            "quantize",
            (-(-groups // limits.LANES), 1),
            ((limits.ELEMENTS[hidden.dtype], hidden), ("Int32", x), ("Uint8", x_scale)),
            (groups,),
            (limits.ELEMENTS[hidden.dtype],),
        ),
        Launch(
            "gate_up",
            (i // limits.BLOCK, tiles.number),
            (
                ("Int32", x),
                ("Uint8", x_scale),
                ("Int32", packed.gate_up),
                ("Uint8", packed.gate_up_scale),
                *order,
                ("Int32", z),
                ("Uint8", z_scale),
            ),
            (),
            (h, i, top_k, tiles.direct, *constants),
        ),
        Launch(
            "down",
            (h // limits.BLOCK, tiles.number),
            (
                ("Int32", z),
                ("Uint8", z_scale),
                ("Int32", packed.down),
                ("Uint8", packed.down_scale),
                *order,
                ("Float32", partials),
            ),
            (),
            (h, i, tiles.direct),
        ),
        Launch(
            "reduce",
            (-(-h // limits.LANES), tokens),
            (
                ("Float32", partials),
                ("Int32", tiles.local_ids),
                ("Float32", weights),
                (limits.ELEMENTS[out.dtype], out),
            ),
            (),
            (h, top_k, limits.ELEMENTS[out.dtype]),
        ),
    ]


def _mxfp8(like: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty((rows, k), dtype=torch.uint8, device=like.device),
        torch.empty((rows, k // 32), dtype=torch.uint8, device=like.device),
    )


def _check(
    hidden_states: Tensor,
    topk_ids: Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    activations: str,
    out_dtype: torch.dtype,
) -> None:
    problems = [reason for reason, _ in limits.gate_reasons(gate)]
    problems += [reason for reason, _ in limits.size_reasons(packed.hidden_size, packed.intermediate_size)]
    forbidden = limits.activations_reason(activations)
    if forbidden is not None:
        problems.append(forbidden[0])
    elif activations not in ("auto", "mxfp8"):
        problems.append(f"activations: got {activations!r}, choices are auto, mxfp8")
    if packed.gate_up_bias is not None or packed.down_bias is not None:
        problems.append("has no biases")
    for what, dtype in (("hidden_states", hidden_states.dtype), ("the result", out_dtype)):
        if dtype not in limits.ELEMENTS:
            problems.append(f"{what} must be bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}")
    tiles = max(topk_ids.shape[0], max_tiles(topk_ids.numel(), packed.num_experts))
    if tiles > _MAX_TILES:
        problems.append(f"too many tokens at once: {topk_ids.shape[0]}")
    if problems:
        raise ExpertInputError("the flydsl backend cannot run this: " + "; ".join(problems))
