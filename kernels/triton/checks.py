"""What a caller of `experts` can get wrong, as `ExpertInputError` naming the value and the choices."""

from __future__ import annotations

import torch
import triton

from moe_compile.errors import ExpertInputError
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT_DTYPES = (*HIDDEN_DTYPES, torch.float64)
INTEGER_DTYPES = (torch.int32, torch.int64)
ACTIVATIONS = ("auto", "bf16", "mxfp8")


def check_inputs(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    expert_map: torch.Tensor | None,
    activations: str,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise `ExpertInputError` unless the arguments of `experts` fit together."""
    if hidden_states.dim() != 2 or hidden_states.shape[1] != packed.hidden_size:
        raise ExpertInputError(f"hidden_states: got {_shape(hidden_states)}, expected (T, {packed.hidden_size})")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ExpertInputError(f"topk_ids: got {_shape(topk_ids)}, expected (T, K) with T = {hidden_states.shape[0]}")
    if topk_weights.shape != topk_ids.shape:
        raise ExpertInputError(f"topk_weights: got {_shape(topk_weights)}, but topk_ids is {_shape(topk_ids)}")
    rows = packed.intermediate_size * (2 if gate.gated else 1)
    if packed.gate_up.shape[1] != rows:
        raise ExpertInputError(
            f"packed.gate_up: got {packed.gate_up.shape[1]} rows, expected {rows} for I = {packed.intermediate_size} "
            f"and gated={gate.gated}"
        )
    _check_dtype("hidden_states", hidden_states.dtype, HIDDEN_DTYPES)
    _check_dtype("topk_ids", topk_ids.dtype, INTEGER_DTYPES)
    _check_dtype("topk_weights", topk_weights.dtype, FLOAT_DTYPES)
    if out_dtype is not None:
        _check_dtype("out_dtype", out_dtype, FLOAT_DTYPES)
    if expert_map is not None:
        _check_dtype("expert_map", expert_map.dtype, INTEGER_DTYPES)
        if expert_map.dim() != 1 or expert_map.numel() == 0:
            raise ExpertInputError(f"expert_map: got {_shape(expert_map)}, expected (global experts,)")
    if activations not in ACTIVATIONS:
        raise ExpertInputError(f"activations: got {activations!r}, choices are {', '.join(ACTIVATIONS)}")
    device = hidden_states.device
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ExpertInputError("hidden_states is on the CPU; Triton kernels need a GPU (or TRITON_INTERPRET=1, slow)")
    tensors = {"topk_ids": topk_ids, "topk_weights": topk_weights, "expert_map": expert_map, **vars(packed)}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ExpertInputError(f"{name} is on {tensor.device}, but hidden_states is on {device}")


def _check_dtype(name: str, dtype: torch.dtype, choices: tuple[torch.dtype, ...]) -> None:
    if dtype not in choices:
        raise ExpertInputError(f"{name}: got {dtype}, choices are {', '.join(map(str, choices))}")


def _shape(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
