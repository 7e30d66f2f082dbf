"""The oracle: one expert block with torch operators, on the same packed weights that the kernels read.

``out[t] = sum_k topk_weights[t, k] * (down[e] @ act(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``,
``e = topk_ids[t, k]``; a (t, k) slot whose id names no expert here contributes exactly zero.

Both products accumulate in ``compute_dtype``. The intermediate ``act(...)`` is rounded to the dtype of the hidden
states, as the models and the kernels do; routing weights are used in the precision they come in, after the down
projection. With ``activations="mxfp8"`` the hidden states and the intermediate are quantised as well.

There are three evaluation orders with this one meaning, because a data-dependent loop is the fastest on a CPU and
impossible under graph capture and on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import expert_parallel, mxfp8
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

Evaluation = Literal["auto", "occurring", "gathered", "dense"]
EVALUATIONS: tuple[str, ...] = get_args(Evaluation)
REFERENCE_ACTIVATIONS = ("bf16", "mxfp8")

# The static orders hold about this much of dequantised weights or of activations at a time.
_CHUNK_BYTES = 256 * 2**20


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    *,
    expert_map: Tensor | None = None,
    activations: str = "bf16",
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
    evaluation: Evaluation = "auto",
) -> Tensor:
    """Evaluate one expert block. T tokens, K top-k, E experts in ``packed``, H hidden size.

    Args:
        hidden_states: (T, H), a float dtype.
        topk_ids: (T, K) int32 or int64. Ids below 0 or from E on (or mapped to -1) contribute exactly zero.
        topk_weights: (T, K), a float dtype.
        packed: canonical MXFP8 weights.
        gate: the function between the two projections.
        expert_map: (global experts,) integers, global id -> index into ``packed``, -1 for "not here"; then
            ``topk_ids`` are global.
        activations: ``bf16`` uses the activations as they are, ``mxfp8`` quantises them before either projection.
        out_dtype: of the result; the dtype of ``hidden_states`` if None.
        compute_dtype: float32 or float64. On a GPU, float32 products follow ``torch.backends.cuda.matmul.allow_tf32``.
        evaluation: ``occurring`` loops over the experts that occur (reads the ids on the host). The others are static,
            with no host synchronisation: ``gathered`` takes the weights of every slot, ``dense`` runs every expert on
            every token. ``auto`` takes ``occurring`` for real CPU tensors, else ``gathered`` up to E slots, else
            ``dense``.

    Returns:
        (T, H), contiguous, aliasing no input.

    Raises:
        ExpertInputError: shapes or dtypes that do not fit together, or an unknown choice.
    """
    _check(hidden_states, topk_ids, topk_weights, packed, gate, expert_map, activations, compute_dtype, evaluation)
    local_ids = expert_parallel.local_ids(topk_ids, expert_map, packed.num_experts)
    block = _Block(packed, gate, hidden_states.dtype, activations, compute_dtype)
    x = block.activation(hidden_states)
    if evaluation == "auto":
        if hidden_states.device.type == "cpu" and type(hidden_states) is Tensor:  # a fake tensor is a subclass
            evaluation = "occurring"
        else:
            evaluation = "gathered" if topk_ids.numel() <= packed.num_experts else "dense"
    evaluate = {"occurring": _occurring, "gathered": _gathered, "dense": _dense}[evaluation]
    out = evaluate(block, x, local_ids, topk_weights.to(compute_dtype))
    return out.to(hidden_states.dtype if out_dtype is None else out_dtype)


def dequantized(packed: PackedExperts, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``gate_up`` (E, 2I, H) and ``down`` (E, H, I) as numbers."""
    return (
        mxfp8.dequantize(packed.gate_up, packed.gate_up_scale, dtype),
        mxfp8.dequantize(packed.down, packed.down_scale, dtype),
    )


@dataclass(frozen=True)
class _Weights:
    """Dequantised weights of one expert, or of a batch of experts (then every shape has a leading batch dimension)."""

    gate_up: Tensor  # (2I, H)
    down: Tensor  # (H, I)
    gate_up_bias: Tensor | None  # (1, 2I)
    down_bias: Tensor | None  # (1, H)


@dataclass(frozen=True)
class _Block:
    packed: PackedExperts
    gate: GateFunction
    hidden_dtype: torch.dtype
    activations: str
    compute_dtype: torch.dtype

    def activation(self, x: Tensor) -> Tensor:
        """What a projection sees of an activation ``x`` (..., K)."""
        x = x.to(self.hidden_dtype)
        if self.activations == "mxfp8":
            return mxfp8.dequantize(*mxfp8.quantize(x), self.compute_dtype)
        return x.to(self.compute_dtype)

    def weights(self, index: int | Tensor) -> _Weights:
        """Of expert ``index``, or of a batch of experts (c,)."""
        packed = self.packed

        def decode(values: Tensor, scales: Tensor) -> Tensor:
            chosen = values.view(torch.uint8)[index].view(torch.float8_e4m3fn)
            return mxfp8.dequantize(chosen, scales[index], self.compute_dtype)

        def bias(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index].to(self.compute_dtype).unsqueeze(-2)

        return _Weights(
            decode(packed.gate_up, packed.gate_up_scale),
            decode(packed.down, packed.down_scale),
            bias(packed.gate_up_bias),
            bias(packed.down_bias),
        )

    def apply(self, x: Tensor, weights: _Weights) -> Tensor:
        """(..., n, H) -> (..., n, H), before the routing weights."""
        gate_up = x @ weights.gate_up.mT
        if weights.gate_up_bias is not None:
            gate_up = gate_up + weights.gate_up_bias
        intermediate = self.gate(*gate_up.chunk(2, dim=-1)) if self.gate.gated else self.gate(gate_up)
        out = self.activation(intermediate) @ weights.down.mT
        return out if weights.down_bias is None else out + weights.down_bias


def _occurring(block: _Block, x: Tensor, local_ids: Tensor, topk_weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in torch.unique(local_ids[local_ids >= 0]).tolist():
        tokens, slots = torch.where(local_ids == expert)
        expert_out = block.apply(x[tokens], block.weights(expert))
        out.index_add_(0, tokens, expert_out * topk_weights[tokens, slots].unsqueeze(-1))
    return out


def _gathered(block: _Block, x: Tensor, local_ids: Tensor, topk_weights: Tensor) -> Tensor:
    num_tokens, top_k = local_ids.shape
    slot_out = x.new_zeros((num_tokens * top_k, x.shape[1]))
    if block.packed.num_experts == 0:
        return slot_out.view(num_tokens, top_k, x.shape[1]).sum(1)
    # Twice: the decoded elements and their product with the scales.
    slot_elements = block.packed.gate_up[0].numel() + block.packed.down[0].numel()
    chunk = max(1, _CHUNK_BYTES // (2 * slot_elements * x.element_size()))
    for start in range(0, num_tokens * top_k, chunk):
        slots = slice(start, start + chunk)
        ids = local_ids.flatten()[slots]
        tokens = torch.arange(num_tokens, device=x.device).repeat_interleave(top_k)[slots]
        out = block.apply(x[tokens].unsqueeze(1), block.weights(ids.clamp(min=0))).squeeze(1)
        weighted = out * topk_weights.flatten()[slots].unsqueeze(-1)
        # Chosen with `where`: a product with zero would let a NaN through.
        slot_out[slots] = torch.where((ids >= 0).unsqueeze(-1), weighted, 0)
    return slot_out.view(num_tokens, top_k, x.shape[1]).sum(1)


def _dense(block: _Block, x: Tensor, local_ids: Tensor, topk_weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    chunk = max(1, _CHUNK_BYTES // (4 * block.packed.gate_up.shape[1] * x.element_size()))
    for expert in range(block.packed.num_experts):
        weights = block.weights(expert)
        for start in range(0, x.shape[0], chunk):
            tokens = slice(start, start + chunk)
            chosen = local_ids[tokens] == expert  # (n, K)
            weight = torch.where(chosen, topk_weights[tokens], 0).sum(1, keepdim=True)
            weighted = block.apply(x[tokens], weights) * weight
            out[tokens] += torch.where(chosen.any(1, keepdim=True), weighted, 0)
    return out


def _check(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    expert_map: Tensor | None,
    activations: str,
    compute_dtype: torch.dtype,
    evaluation: str,
) -> None:
    if hidden_states.dim() != 2 or hidden_states.shape[1] != packed.hidden_size:
        raise ExpertInputError(
            f"hidden_states has shape {tuple(hidden_states.shape)}, expected (T, {packed.hidden_size})"
        )
    expected = f"(T, K) with T = {hidden_states.shape[0]}"
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ExpertInputError(f"topk_ids has shape {tuple(topk_ids.shape)}, expected {expected}")
    if topk_weights.shape != topk_ids.shape:
        raise ExpertInputError(f"topk_weights has shape {tuple(topk_weights.shape)}, topk_ids {tuple(topk_ids.shape)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ExpertInputError(f"topk_ids is {topk_ids.dtype}, expected torch.int32 or torch.int64")
    for name, tensor in (("hidden_states", hidden_states), ("topk_weights", topk_weights)):
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ExpertInputError(f"{name} is {tensor.dtype}, expected float32, bfloat16, float16 or float64")
    rows = packed.gate_up.shape[1]
    if rows != packed.intermediate_size * (2 if gate.gated else 1):
        raise ExpertInputError(
            f"packed.gate_up has {rows} rows for I = {packed.intermediate_size}, which gated={gate.gated} does not fit"
        )
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.is_floating_point() or not len(expert_map)):
        raise ExpertInputError(
            f"expert_map is {expert_map.dtype} {tuple(expert_map.shape)}, expected integers (global experts,)"
        )
    if activations not in REFERENCE_ACTIVATIONS:
        raise ExpertInputError(f"activations: got {activations!r}, choices are {', '.join(REFERENCE_ACTIVATIONS)}")
    if compute_dtype not in (torch.float32, torch.float64):
        raise ExpertInputError(f"compute_dtype: got {compute_dtype}, choices are torch.float32, torch.float64")
    if evaluation not in EVALUATIONS:
        raise ExpertInputError(f"evaluation: got {evaluation!r}, choices are {', '.join(EVALUATIONS)}")
