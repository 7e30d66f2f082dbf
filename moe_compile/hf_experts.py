"""``experts_implementation="moe_rocm"``: the experts forward that transformers calls, as one call of our operator.

transformers decorates each experts class so that its ``forward`` is looked up by name in a registry. What such a
forward computes is fixed by the ones in transformers (``grouped_mm``), which read the same flags and weights; only the
gate function is the class's own code (``_apply_gate`` and ``act_fn``), and that is proven by evaluation, once a module.

Proof and choice of kernels are a :class:`Plan` kept on the module: under torch.compile the plan is made while Dynamo
traces, and Dynamo guards on its values, so code compiled for one module is never used for one with another plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_compile import hf_fp8
from moe_compile.errors import MoeCompileError, UnsupportedExperts
from moe_compile.kernels.ops import KERNELS, attributes, operator
from moe_compile.kernels.registry import BACKENDS
from moe_compile.options import CompileOptions
from moe_compile.passes.fx_utils import Unproven
from moe_compile.passes.gate_callable import recognise
from moe_compile.passes.match_experts_op import weight_format
from moe_compile.selection import Rejection, select_backend
from moe_compile.sharding import gate_up_problem, local_part, placements_of
from moe_compile.spec import ExpertSpec
from moe_compile.target import Capabilities, Target
from moe_compile.torch_internals import CompileTimeError, ComptimeContext, comptime, traced_module, traced_tensor

logger = logging.getLogger("moe_compile.hf")

NAME = "moe_rocm"
ALTERNATIVE = "use experts_implementation='grouped_mm' or 'eager' for this model"
ExpertsForward = Callable[..., torch.Tensor]

_OPERATORS = {name: operator(name) for name in KERNELS}


@dataclass(frozen=True)
class Plan:
    """What runs one experts module: an operator and its keyword arguments, for inputs like ``key``."""

    key: tuple[Any, ...]
    backend: str
    attributes: tuple[tuple[str, Any], ...]
    spec: ExpertSpec
    rejected: tuple[Rejection, ...] = ()


def make_forward(with_gradients: ExpertsForward) -> ExpertsForward:
    """The forward for a registry whose ``grouped_mm`` is ``with_gradients``."""

    def moe_rocm_experts_forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``out[t] = sum_k top_k_weights[t, k] * expert[top_k_index[t, k]](hidden_states[t])`` on MXFP8 weights.

        Ids from E on (expert-parallel sentinels) contribute exactly zero. Where a gradient is needed this is
        ``grouped_mm``, on the unquantised weights.

        Args:
            hidden_states: (T, H) bf16, fp16 or fp32.
            top_k_index: (T, K) integers.
            top_k_weights: (T, K), any float dtype.

        Raises:
            UnsupportedExperts, BackendRefused (each a ValueError): the module cannot be run, with the reason.
        """
        module: Any = self
        up = module.gate_up_proj if module.has_gate else module.up_proj
        down = module.down_proj
        is_fp8 = up.dtype.itemsize == 1
        if torch.is_grad_enabled() and (
            hidden_states.requires_grad
            or top_k_weights.requires_grad
            or (not is_fp8 and (up.requires_grad or down.requires_grad))
        ):
            _say_gradients_are_needed(type(self).__name__)
            return with_gradients(self, hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_compiling():
            comptime(_prepare_traced)
        else:
            _prepare(self, hidden_states, top_k_index, top_k_weights)
        plan = module._moe_compile_plan
        up_scale = down_scale = up_bias = down_bias = None
        if is_fp8:
            up_scale = module.gate_up_proj_scale_inv if module.has_gate else module.up_proj_scale_inv
            down_scale = module.down_proj_scale_inv
        if module.has_bias:
            up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
            down_bias = module.down_proj_bias
        out: torch.Tensor = _OPERATORS[plan.backend](
            hidden_states,
            top_k_index,
            top_k_weights,
            up,
            down,
            up_scale,
            down_scale,
            up_bias,
            down_bias,
            **dict(plan.attributes),
        )
        return out

    return moe_rocm_experts_forward


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_gradients_are_needed(name: str) -> None:
    if name not in _said:
        _said.add(name)
        logger.warning(
            "%s: a gradient is needed, and MXFP8 experts have none, so grouped_mm on the model's own weights runs. "
            "For inference call the model under torch.no_grad() or torch.inference_mode().",
            name,
        )


_said: set[str] = set()


def _prepare(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> None:
    """Put the plan for such inputs on the module."""
    device, dtype, routing_dtype = hidden_states.device, hidden_states.dtype, top_k_weights.dtype
    top_k = int(top_k_index.shape[-1])
    found = module.__dict__.get("_moe_compile_plan")
    if found is None or found.key != (str(device), str(dtype), str(routing_dtype), top_k):
        module.__dict__["_moe_compile_plan"] = make_plan(module, device, dtype, routing_dtype, top_k)


def _prepare_traced(context: ComptimeContext) -> None:
    """:func:`_prepare` while Dynamo traces our forward: what it puts on the module, the traced code reads next."""
    tensors = (traced_tensor(context, name) for name in ("hidden_states", "top_k_index", "top_k_weights"))
    try:
        _prepare(traced_module(context, "self"), *tensors)
    except MoeCompileError as error:
        raise CompileTimeError.wrap(error) from None


def make_plan(
    module: torch.nn.Module, device: torch.device, dtype: torch.dtype, routing_dtype: torch.dtype, top_k: int
) -> Plan:
    """Prove the module's gate function and choose a backend for it.

    Raises:
        UnsupportedExperts (a ValueError): names the class, the reason and the alternative.
        BackendRefused (a ValueError): an explicit ``moe_backend`` cannot run it.
    """
    spec = specify(module, dtype, routing_dtype, top_k)
    options = options_of(module)
    selection = select_backend(options, spec, Target.of(device), Capabilities.detect(), BACKENDS)
    for caution in selection.cautions:
        _warn_once(f"experts_implementation={NAME!r}: caution: {caution}")
    return Plan(
        (str(device), str(dtype), str(routing_dtype), top_k),
        selection.backend,
        tuple(attributes(spec, options.activations).items()),
        spec,
        selection.rejected,
    )


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def options_of(module: torch.nn.Module) -> CompileOptions:
    """Those that ``accelerate`` gave the module, over the environment."""
    return CompileOptions.parse(dict(module.__dict__.get("_moe_compile_options", ())))


def specify(
    module: torch.nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    routing_dtype: torch.dtype = torch.float32,
    top_k: int = 1,
) -> ExpertSpec:
    """What an experts module computes, proven.

    Raises:
        UnsupportedExperts (a ValueError): it cannot be run by our operators; names the class, the reason and the
            alternative.
    """
    experts: Any = module
    name = type(module).__name__
    if not is_experts(module):
        raise UnsupportedExperts(
            f"{name} is not an experts class that transformers dispatches by name; experts_implementation={NAME!r} has "
            f"no effect on it"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise _unsupported(module, "it has a norm between the down projection and the routing weights")
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = getattr(module, up_name, None), getattr(module, "down_proj", None)
    for weight_name, weight in ((up_name, up), ("down_proj", down)):
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
            raise _unsupported(module, f"its {weight_name} is no 3-D tensor")
        if weight.is_meta:
            raise _unsupported(module, f"its {weight_name} has no data: it is on the meta device (offloaded?)")
        if hasattr(local_part(weight), "__tensor_flatten__"):
            raise _unsupported(
                module, f"its {weight_name} is a {type(weight).__name__}, and only plain tensors are packed"
            )
    assert up is not None
    assert down is not None
    placements, up, down = placements_of(up), local_part(up), local_part(down)
    if up.dtype.itemsize == 1:
        problem = hf_fp8.problem(module, up_name)
        if problem is not None:
            raise _unsupported(module, *problem)
    transposed = bool(experts.is_transposed)
    num_experts, hidden, intermediate = down.shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    function = experts._apply_gate if experts.has_gate else experts.act_fn
    probe_dtype = dtype if up.dtype.itemsize == 1 else up.dtype
    try:
        gate, layout, up_first = recognise(function, up.shape[2 if transposed else 1], probe_dtype)
    except Unproven as problem_found:
        raise _unsupported(module, f"its gate function could not be proven: {problem_found.reason}") from None
    split = gate_up_problem(placements, 2 if transposed else 1, gate.gated, layout)
    if split is not None:
        raise _unsupported(module, split, "nor can any other implementation of these experts")
    if gate.gated != experts.has_gate:
        raise _unsupported(module, f"has_gate={experts.has_gate}, but its activation is {gate}")
    return ExpertSpec(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        top_k=top_k,
        gate=gate,
        gate_up_layout=layout,
        up_first=up_first,
        transposed=transposed,
        has_bias=bool(experts.has_bias),
        weight_format=weight_format(up.dtype),
        activation_dtype=dtype,
        routing_dtype=routing_dtype,
        out_dtype=dtype,
    )


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers dispatches this module's forward by name: its decorator sets these."""
    return all(name in module.__dict__ for name in ("config", "has_gate", "has_bias", "is_transposed"))


def _unsupported(module: torch.nn.Module, reason: str, alternative: str = ALTERNATIVE) -> UnsupportedExperts:
    return UnsupportedExperts(
        f"experts_implementation={NAME!r} cannot run {type(module).__name__}: {reason}; {alternative}"
    )
