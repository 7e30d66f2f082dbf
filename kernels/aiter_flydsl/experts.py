"""The call of ``aiter.fused_moe.fused_moe``, and everything that it does not check itself."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError, GraphCaptureError
from moe_compile.kernels.aiter_flydsl import limits
from moe_compile.kernels.aiter_flydsl.packed import AiterExperts
from moe_compile.kernels.aiter_flydsl.routing import routing
from moe_compile.spec import GateFunction

# Token counts at which AITER's heuristics change kernels, besides its powers of two.
_KERNEL_CHANGES = (2048, 4096, 16384)
_LARGEST_BUCKETS = (32768, 131072)

# What AITER compiled and loaded in this process: keys of `_kernel_key`.
_warm: set[Hashable] = set()


@dataclass(frozen=True)
class FusedMoe:
    """AITER's entry point as it is installed here. ``parameters`` differ from release to release."""

    function: Callable[..., Tensor]
    parameters: frozenset[str]
    activations: Any  # ActivationType; a pybind11 enum, which has attributes and no items
    per_1x32: Any  # the QuantType of MXFP8
    runtime_limit: bool

    def __call__(self, **arguments: Any) -> Tensor:
        """
        Raises:
            ExpertInputError: this release has no parameter of one of the names; none of them can be left out.
        """
        unknown = sorted(arguments.keys() - self.parameters)
        if unknown:
            raise ExpertInputError(
                f"aiter.fused_moe.fused_moe has no parameter {', '.join(unknown)}; it has {sorted(self.parameters)}"
            )
        return self.function(**arguments)


@functools.cache
def fused_moe() -> FusedMoe:
    """Import AITER. `moe_compile.aiter_package` has found it usable, or a caller of the operator learns why not."""
    aiter = importlib.import_module("aiter")
    function = importlib.import_module("aiter.fused_moe").fused_moe
    kernels = importlib.import_module("aiter.ops.flydsl.moe_kernels")
    return FusedMoe(
        function,
        frozenset(inspect.signature(function).parameters),
        aiter.ActivationType,
        aiter.QuantType.per_1x32,
        hasattr(kernels, "runtime_swiglu_limit"),
    )


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: AiterExperts,
    gate: GateFunction,
    *,
    expert_map: Tensor | None = None,
    activations: str = "auto",
    out_dtype: torch.dtype,
) -> Tensor:
    """Evaluate one expert block with AITER's kernels. Both GEMMs read activations rounded to MXFP8.

    Args:
        hidden_states: (T, H) bf16 or fp16.
        topk_ids: (T, K) int32 or int64; ids that name no expert contribute zero.
        topk_weights: (T, K), any float dtype.
        packed: weights in AITER's order.
        gate: silu, or silu(alpha=1.702, up_offset=1), each with or without a limit.
        expert_map: (E_global,) global to local ids, -1 for absent; ``topk_ids`` are then global.
        activations: ``auto`` or ``mxfp8``.
        out_dtype: bf16 or fp16.

    Returns:
        (T, H), a new tensor. Stage 2 adds with atomics, in no fixed order.

    Raises:
        ExpertInputError: something that AITER's kernels cannot run.
        GraphCaptureError: a graph is being captured, and AITER has not run such a batch before.
    """
    tokens, top_k = topk_ids.shape
    kind = _check(hidden_states, top_k, gate, activations, out_dtype)
    if tokens == 0 or packed.num_experts == 0:  # AITER divides by the number of tokens
        return hidden_states.new_zeros(hidden_states.shape, dtype=out_dtype)
    aiter = fused_moe()
    _check_limit(gate, aiter.runtime_limit)
    key = _kernel_key(hidden_states, topk_ids, topk_weights, packed, kind, expert_map, out_dtype)
    if key not in _warm:
        _refuse_capture(hidden_states, tokens)
    ids, weights = routing(topk_ids, topk_weights, expert_map, packed.mask)
    with _device_of(hidden_states):
        out = aiter(
            hidden_states=hidden_states.contiguous(),
            w1=packed.gate_up,
            w2=packed.down,
            topk_weight=weights,
            topk_ids=ids,
            expert_mask=packed.mask.tensor,
            activation=getattr(aiter.activations, kind),
            quant_type=aiter.per_1x32,
            doweight_stage1=False,
            w1_scale=packed.gate_up_scale,
            w2_scale=packed.down_scale,
            dtype=out_dtype,
            swiglu_limit=limits.swiglu_limit(gate),
            gate_mode="interleave",
        )
    _warm.add(key)
    return out


def bucket(tokens: int) -> tuple[int, int]:
    """Batches of one bucket run the same kernels of AITER, so that one of them warms up for all."""
    if tokens >= _LARGEST_BUCKETS[0]:
        padded = _LARGEST_BUCKETS[tokens >= _LARGEST_BUCKETS[1]]
    else:
        padded = 1 << (tokens - 1).bit_length()
    return padded, sum(tokens >= change for change in _KERNEL_CHANGES)


def _kernel_key(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: AiterExperts,
    kind: limits.Kind,
    expert_map: Tensor | None,
    out_dtype: torch.dtype,
) -> Hashable:
    """Everything that AITER's kernels, and ours for the routing, are compiled for."""
    return (
        hidden_states.device,
        (hidden_states.dtype, topk_ids.dtype, topk_weights.dtype, out_dtype),
        tuple(packed.gate_up.shape),
        topk_ids.shape[1],
        kind,
        None if expert_map is None else (expert_map.shape[0], expert_map.dtype),
        bucket(hidden_states.shape[0]),
    )


def _refuse_capture(hidden_states: Tensor, tokens: int) -> None:
    if hidden_states.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    raise GraphCaptureError(
        f"AITER has not run a batch like this one of {tokens} tokens yet: it compiles and loads kernels on the first "
        f"call, which cannot happen while a CUDA graph is being captured. Call the model once with {tokens} tokens "
        "before the capture."
    )


def _check(
    hidden_states: Tensor, top_k: int, gate: GateFunction, activations: str, out_dtype: torch.dtype
) -> limits.Kind:
    kind = limits.kind_of(gate)
    problems = [reason for reason, _ in limits.gate_reasons(gate, runtime_limit=True)]
    forbidden = limits.activations_reason(activations)
    if forbidden is not None:
        problems.append(forbidden[0])
    elif activations not in ("auto", "mxfp8"):
        problems.append(f"activations: got {activations!r}, choices are auto, mxfp8")
    for what, dtype in (("hidden_states", hidden_states.dtype), ("the result", out_dtype)):
        if dtype not in (torch.bfloat16, torch.float16):
            problems.append(f"{what} must be bfloat16 or float16, got {str(dtype).removeprefix('torch.')}")
    if hidden_states.shape[0] > limits.MAX_TOKENS:
        problems.append(f"at most {limits.MAX_TOKENS} tokens, got {hidden_states.shape[0]}")
    if not 1 <= top_k <= limits.MAX_TOP_K:
        problems.append(f"top-k must be 1 to {limits.MAX_TOP_K}, got {top_k}")
    if problems or kind is None:
        raise ExpertInputError("the aiter backend cannot run this: " + "; ".join(problems))
    return kind


def _check_limit(gate: GateFunction, runtime_limit: bool) -> None:
    problems = [reason for reason, _ in limits.gate_reasons(gate, runtime_limit)]
    if problems:
        raise ExpertInputError("the aiter backend cannot run this: " + "; ".join(problems))


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """AITER launches on the current device, whatever device its tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()
