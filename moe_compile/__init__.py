"""moe_compile: fused MXFP8 mixture-of-experts for torch.compile.

``torch.compile(model, backend="moe_rocm")`` needs no import of this package. The names below are for looking at what
was done; nothing else is public, except the options of the backend and the operators' schemas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_compile._version import __version__

if TYPE_CHECKING:
    from moe_compile.explanation import explain, refresh
    from moe_compile.hf import register_hf_experts
    from moe_compile.hf_accelerate import accelerate
    from moe_compile.kernels.registry import available_backends
    from moe_compile.report import CompileReport, LayerReport, reports

__all__ = [
    "CompileReport",
    "LayerReport",
    "__version__",
    "accelerate",
    "available_backends",
    "explain",
    "refresh",
    "register_hf_experts",
    "reports",
]

# Found on first use: importing the package must not import Inductor, which takes a second and half a gigabyte.
_WHERE = {
    "explain": "moe_compile.explanation",
    "refresh": "moe_compile.explanation",
    "register_hf_experts": "moe_compile.hf",
    "accelerate": "moe_compile.hf_accelerate",
    "available_backends": "moe_compile.kernels.registry",
    "CompileReport": "moe_compile.report",
    "LayerReport": "moe_compile.report",
    "reports": "moe_compile.report",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe_compile' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
