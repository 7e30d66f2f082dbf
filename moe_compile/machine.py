"""What a bug report needs to know about this machine: versions, GPU and environment variables, as text."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

import torch

from moe_compile._version import __version__
from moe_compile.env import VARIABLES, unknown_variables
from moe_compile.target import Capabilities, Package, Target

# Other people's variables that change what is compiled or which GPU is seen; shown when they are set.
_FOREIGN_PREFIXES = (
    "TORCHINDUCTOR_",
    "TORCH_LOGS",
    "TRITON_",
    "AITER_",
    "FLYDSL_",
    "CUDA_VISIBLE",
    "HIP_VISIBLE",
    "ROCR_",
)


def versions() -> dict[str, str]:
    """Package to version, or to the reason why it cannot be used. Imports none of them but torch."""
    found = Capabilities.detect()
    return {
        "moe_compile": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__ + (f", ROCm {torch.version.hip}" if torch.version.hip else ""),
        "triton": _describe(found.triton) + (" (TRITON_INTERPRET=1)" if found.triton_interpreted else ""),
        "transformers": _installed_version("transformers"),
        "aiter": _describe(found.aiter),
        "flydsl": _describe(found.flydsl),
        "C++ compiler": cpp_compiler() or "none found (Inductor needs one on the CPU: install g++ or set CXX)",
    }


def gpus() -> list[str]:
    """``NVIDIA H200 (sm_90)``, one line for each GPU that torch sees."""
    return [
        f"{torch.cuda.get_device_name(index)} ({Target.of(torch.device('cuda', index)).arch})"
        for index in range(torch.cuda.device_count())
    ]


def cpp_compiler() -> str | None:
    """The compiler that Inductor would call for the CPU, ``$CXX`` or ``g++``; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def describe() -> str:
    """All of it, one fact to a line, to paste into an issue."""
    lines = [f"{name}: {version}" for name, version in versions().items()]
    lines += [f"GPU {index}: {name}" for index, name in enumerate(gpus())] or ["GPU: none"]
    lines += ["", "environment variables:"]
    width = max(len(variable.full_name) for variable in VARIABLES)
    for variable in VARIABLES:
        value = variable.get()
        shown = f"= {value}" if value is not None else "(not set)"
        lines.append(f"  {variable.full_name:{width}} {shown:12} {variable.description}")
    lines += [f"  {name} = {os.environ[name]}  unknown to moe_compile" for name in unknown_variables()]
    lines += [f"  {name} = {value}" for name, value in sorted(os.environ.items()) if name.startswith(_FOREIGN_PREFIXES)]
    return "\n".join(lines)


def to_dict() -> dict[str, object]:
    """What ``describe`` says, for JSON: versions, GPUs, and the variables that are set, ours, unknown and foreign."""
    return {
        "versions": versions(),
        "gpus": gpus(),
        "variables": {variable.full_name: variable.get() for variable in VARIABLES},
        "unknown_variables": {name: os.environ[name] for name in unknown_variables()},
        "foreign_variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(_FOREIGN_PREFIXES)},
    }


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(package: Package) -> str:
    """``3.7.1``, ``aiter is not installed (...)``, ``0.1.13: fused_moe of aiter 0.1.13 has no parameter ...``."""
    return ": ".join(filter(None, (package.version, package.problem))) or "unknown version"
