"""The expert operators: one visible operator per backend, one schema for all.

``moe_compile::<backend>_experts`` is functional (mutates nothing, returns a fresh contiguous tensor) and takes the
model's own weight tensors. Float weights are packed to MXFP8 on first use, through :mod:`moe_compile.packed_weights`;
float8_e4m3fn weights come with their E8M0 scales and are used as they are.

``out[t] = sum_k topk_weights[t, k] * down[e] @ act(gate[e] @ x[t], up[e] @ x[t])``,  ``e = topk_ids[t, k]``

| argument | shape | dtype |
|---|---|---|
| hidden_states | (T, H) | bf16, fp16 or fp32 |
| topk_ids | (T, K) | int32 or int64; ids < 0 or >= E contribute zero |
| topk_weights | (T, K) | any float |
| gate_up_proj | (E, 2I, H); (E, H, 2I) if transposed; I instead of 2I if not gated | float, or float8_e4m3fn |
| down_proj | (E, H, I); (E, I, H) if transposed | as gate_up_proj; float8 weights are never transposed |
| gate_up_scale, down_scale | (E, N, ceil(K/32)) | uint8 or float8_e8m0fnu, with float8 weights only |
| gate_up_bias, down_bias | (E, 2I), (E, H) | any float |
| expert_map | (E_global,) global to local id, -1 for absent; topk_ids are then global | int32 or int64 |

The keyword arguments spell out a :class:`moe_compile.spec.GateFunction`, the weights' layout and the output dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_compile import packed_weights
from moe_compile.errors import ExpertInputError
from moe_compile.kernels import layouts, reference
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import ExpertSpec, GateFunction
from moe_compile.torch_internals import OpOverload

SCHEMA = (
    "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor gate_up_proj, Tensor down_proj, "
    "Tensor? gate_up_scale=None, Tensor? down_scale=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    "Tensor? expert_map=None, *, str activation='silu', float alpha=1.0, float? limit=None, bool limit_after=False, "
    "float up_offset=0.0, float? gate_softcap=None, float? up_softcap=None, bool gated=True, "
    "str gate_up_layout='concatenated', bool up_first=False, bool transposed=False, str activations='auto', "
    "ScalarType? out_dtype=None) -> Tensor"
)
NAMESPACE = "moe_compile"

Kernel = Callable[..., torch.Tensor]


def _triton_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
    # Imported on first use: `import moe_compile` works, and names the problem, where Triton is missing.
    from moe_compile.kernels.triton.experts import experts

    out: torch.Tensor = experts(*args, **kwargs)
    return out


def _aiter_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
    from moe_compile.kernels.aiter_flydsl.experts import experts

    out: torch.Tensor = experts(*args, **kwargs)
    return out


def _reference_kernel(*args: Any, activations: str, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = reference.experts(*args, activations="bf16" if activations == "auto" else activations, **kwargs)
    return out


KERNELS: dict[str, Kernel] = {"aiter": _aiter_kernel, "reference": _reference_kernel, "triton": _triton_kernel}


def operator(backend: str) -> OpOverload:
    """The operator of one backend, such as ``torch.ops.moe_compile.triton_experts.default``."""
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), f"{backend}_experts").default
    return overload


def is_expert_operator(target: object) -> bool:
    return any(target is operator(backend) for backend in KERNELS)


def attributes(spec: ExpertSpec, activations: str = "auto") -> dict[str, Any]:
    """The operator's keyword arguments for a spec; those at their default are left out."""
    values = {
        "activation": spec.gate.activation,
        "alpha": spec.gate.alpha,
        "limit": spec.gate.limit,
        "limit_after": spec.gate.limit_after,
        "up_offset": spec.gate.up_offset,
        "gate_softcap": spec.gate.gate_softcap,
        "up_softcap": spec.gate.up_softcap,
        "gated": spec.gate.gated,
        "gate_up_layout": spec.gate_up_layout,
        "up_first": spec.up_first,
        "transposed": spec.transposed,
        "activations": activations,
        "out_dtype": None if spec.out_dtype == spec.activation_dtype else spec.out_dtype,
    }
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


_DEFAULTS: dict[str, Any] = {
    "activation": "silu",
    "alpha": 1.0,
    "limit": None,
    "limit_after": False,
    "up_offset": 0.0,
    "gate_softcap": None,
    "up_softcap": None,
    "gated": True,
    "gate_up_layout": "concatenated",
    "up_first": False,
    "transposed": False,
    "activations": "auto",
    "out_dtype": None,
}


class Weights(NamedTuple):
    """The tensors of one block's weights, as the operators take them."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def of(cls, sources: packed_weights.Sources) -> Weights:
        return cls(*sources)  # type: ignore[arg-type]  # sources are the fields of a Weights


def _build(spec: ExpertSpec, sources: packed_weights.Sources) -> PackedExperts:
    return layouts.pack_experts(spec, **Weights.of(sources)._asdict())


def _rebuild(spec: ExpertSpec, packed: PackedExperts, sources: packed_weights.Sources) -> None:
    layouts.repack_into(packed, spec, **Weights.of(sources)._asdict())


def _packed(weights: Weights, spec: ExpertSpec) -> PackedExperts:
    """The canonical MXFP8 form: without a copy if the weights are in it already, else from the cache."""
    if weights.gate_up_scale is not None and layouts.copies_nothing(spec, **weights._asdict()):
        # The cache must not hold it: it would keep the model's own memory alive.
        return _build(spec, weights)
    layout = (spec.gate_up_layout, spec.up_first, spec.transposed, spec.gate.gated)
    packing = packed_weights.Packing(layout, functools.partial(_build, spec), functools.partial(_rebuild, spec))
    packed: PackedExperts = packed_weights.lookup(weights, packing)
    return packed


def _packed_for_aiter(weights: Weights, spec: ExpertSpec) -> Any:
    """In AITER's order, always from the cache: one pack for all graphs, rebuilt in place."""
    from moe_compile.kernels.aiter_flydsl import packed as aiter_packed

    def build(sources: packed_weights.Sources) -> aiter_packed.AiterExperts:
        return aiter_packed.pack(spec, Weights.of(sources)._asdict())

    def rebuild(packed: aiter_packed.AiterExperts, sources: packed_weights.Sources) -> None:
        aiter_packed.repack_into(packed, spec, Weights.of(sources)._asdict())

    layout = (aiter_packed.LAYOUT, spec.gate_up_layout, spec.up_first, spec.transposed)
    return packed_weights.lookup(weights, packed_weights.Packing(layout, build, rebuild))


# How a backend's weights are packed, if not canonically.
PACKERS: dict[str, Callable[[Weights, ExpertSpec], Any]] = {"aiter": _packed_for_aiter}


def _spec(
    weights: Weights, top_k: int, gate: GateFunction, layout: str, up_first: bool, transposed: bool
) -> ExpertSpec:
    num_experts, hidden, intermediate = weights.down_proj.shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    return ExpertSpec(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        top_k=top_k,
        gate=gate,
        gate_up_layout=layout,
        up_first=up_first,
        transposed=transposed,
    )


def _check(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Weights,
    expert_map: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    transposed: bool,
) -> None:
    """What every kernel relies on. The shapes and dtypes of the weights are checked where they are packed."""
    if hidden_states.dim() != 2:
        raise ExpertInputError(f"hidden_states must be (T, H), got shape {tuple(hidden_states.shape)}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ExpertInputError(
            f"topk_ids must be (T, K) with T={hidden_states.shape[0]}, got shape {tuple(topk_ids.shape)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ExpertInputError(
            f"topk_weights must have the shape of topk_ids {tuple(topk_ids.shape)}, got {tuple(topk_weights.shape)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ExpertInputError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if not hidden_states.is_floating_point() or not topk_weights.is_floating_point():
        raise ExpertInputError(
            f"hidden_states and topk_weights must be floating point, got {hidden_states.dtype}, {topk_weights.dtype}"
        )
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ExpertInputError(f"out_dtype must be floating point, got {out_dtype}")
    gate_up, down = weights.gate_up_proj, weights.down_proj
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[0] != down.shape[0]:
        raise ExpertInputError(
            "gate_up_proj and down_proj must be 3-D with one number of experts, "
            f"got {tuple(gate_up.shape)}, {tuple(down.shape)}"
        )
    if (weights.gate_up_scale is None) != (weights.down_scale is None):
        raise ExpertInputError("gate_up_scale and down_scale must be given together: MXFP8 weights have both")
    if transposed and weights.gate_up_scale is not None:
        raise ExpertInputError(
            "transposed=True with block scales: MXFP8 weights are K-last, so transposed must be False"
        )
    hidden = down.shape[2 if transposed else 1]
    if hidden != hidden_states.shape[1]:
        raise ExpertInputError(
            f"hidden_states has H={hidden_states.shape[1]}, but the weights have H={hidden} "
            f"(down_proj {tuple(down.shape)}, transposed={transposed})"
        )
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.dtype not in (torch.int32, torch.int64)):
        raise ExpertInputError(
            f"expert_map must be (E_global,) int32 or int64, got {expert_map.dtype} {tuple(expert_map.shape)}"
        )
    others = {"topk_ids": topk_ids, "topk_weights": topk_weights, "expert_map": expert_map, **weights._asdict()}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden_states.device:
            raise ExpertInputError(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")


def _run(
    kernel: Kernel,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    limit_after: bool = False,
    up_offset: float = 0.0,
    gate_softcap: float | None = None,
    up_softcap: float | None = None,
    gated: bool = True,
    gate_up_layout: str = "concatenated",
    up_first: bool = False,
    transposed: bool = False,
    activations: str = "auto",
    out_dtype: torch.dtype | None = None,
    packer: Callable[[Weights, ExpertSpec], Any] = _packed,
) -> torch.Tensor:
    weights = Weights(gate_up_proj, down_proj, gate_up_scale, down_scale, gate_up_bias, down_bias)
    _check(hidden_states, topk_ids, topk_weights, weights, expert_map, out_dtype, transposed)
    try:
        gate = GateFunction(activation, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap, gated)
        spec = _spec(weights, topk_ids.shape[1], gate, gate_up_layout, up_first, transposed)
    except ValueError as error:
        raise ExpertInputError(str(error)) from None
    out = kernel(
        hidden_states,
        topk_ids,
        topk_weights,
        packer(weights, spec),
        gate,
        expert_map=expert_map,
        activations=activations,
        out_dtype=out_dtype or hidden_states.dtype,
    )
    return out.contiguous()  # as the fake says, whatever the strides of hidden_states


def _fake(hidden_states: torch.Tensor, *args: Any, out_dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Shape, dtype and (contiguous) strides of the result, for symbolic T too."""
    return hidden_states.new_empty(tuple(hidden_states.shape), dtype=out_dtype or hidden_states.dtype)


def _no_gradient(ctx: Any, *grads: Any) -> Sequence[Any]:
    raise NotImplementedError(
        "the moe_compile expert operators have no gradient. Models compiled with backend='moe_rocm' while gradients "
        "are enabled keep their original experts; call the operators themselves under torch.no_grad()."
    )


_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _define(backend: str, kernel: Kernel) -> None:
    name = f"{backend}_experts"
    packer = PACKERS.get(backend, _packed)
    _library.define(name + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _run(kernel, *args, packer=packer, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_gradient, lib=_library)


for _backend, _kernel in KERNELS.items():
    _define(_backend, _kernel)
