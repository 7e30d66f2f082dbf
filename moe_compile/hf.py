"""``register_hf_experts``: the name ``moe_rocm`` in both of transformers' experts registries."""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.errors import MissingPackage, UnsupportedExperts
from moe_compile.hf_experts import NAME, is_experts, make_forward


def register_hf_experts() -> None:
    """Make ``experts_implementation="moe_rocm"`` known to transformers, for float and for FP8 checkpoints.

    ``from_pretrained(..., experts_implementation="moe_rocm")`` and ``model.set_experts_implementation("moe_rocm")``
    then run each experts module as one MXFP8 operator, with and without torch.compile, whatever its backend. Kernels
    are chosen as the backend ``moe_rocm`` chooses them; ``MOE_COMPILE_MOE_BACKEND`` and ``MOE_COMPILE_ACTIVATIONS``
    apply. Calling it again changes nothing.

    Raises:
        MissingPackage (an ImportError): transformers is not installed.
    """
    registries = _registries()
    for registry in registries:
        current = registry.get(NAME)
        if current is None or not getattr(current, "_is_moe_compile", False):
            forward: Any = make_forward(registry["grouped_mm"])
            forward._is_moe_compile = True
            type(registry).register(NAME, forward)


def _registries() -> tuple[Any, Any]:
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise MissingPackage(
            f'moe_compile needs transformers 5.17 or newer for this: pip install "moe_compile[hf]" ({error})'
        ) from None
    return ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS


def dispatched_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module of ``model`` whose forward transformers looks up by name, by its path."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def live_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Those that run ``moe_rocm`` now. A model that records the name and ignores it has none."""
    found = dispatched_experts(model)
    return {name: m for name, m in found.items() if getattr(_config(m), "_experts_implementation", None) == NAME}


def ignored_name(model: object) -> str | None:
    """A sentence if the model's configuration says ``moe_rocm`` and no module of it listens; None if all is well."""
    config = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) != NAME or not isinstance(model, torch.nn.Module):
        return None
    if dispatched_experts(model):
        return None
    return (
        f"{type(model).__name__} has experts_implementation={NAME!r} and ignores it: transformers' experts registry "
        "dispatches none of its modules, so 0 modules run it"
    )


def _config(module: torch.nn.Module) -> Any:
    experts: Any = module
    return experts.config


def require_model(value: object) -> None:
    """Refuse what is not a transformers model.

    Raises:
        UnsupportedExperts (a ValueError): says what was given.
    """
    _registries()
    from transformers import PreTrainedModel

    kind = value if isinstance(value, type) else type(value)
    if not issubclass(kind, PreTrainedModel):
        raise UnsupportedExperts(
            f"accelerate takes a transformers model or model class (PreTrainedModel), got {kind.__module__}."
            f"{kind.__qualname__}; for any other module use torch.compile(model, backend='moe_rocm')"
        )
