"""Compile a launch for a GPU that need not be there, and read what the compiler says about it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_compile.kernels.triton.launch import Launch

# Bytes of shared memory (LDS) that one program may use.
SHARED_MEMORY = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class CompiledLaunch:
    """``asm`` maps a stage (``ttgir``, ``ptx``, ``cubin``, ``amdgcn``, ``hsaco``, ...) to its text or bytes."""

    name: str
    arch: str
    shared: int  # bytes of shared memory of one program
    asm: dict[str, Any]
    metadata: Any

    @property
    def scratch(self) -> int:
        """Bytes of memory of one thread that its spilled registers take."""
        if "amdgcn" in self.asm:
            return _number(r"\.private_segment_fixed_size:\s+(\d+)", self.asm["amdgcn"])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.asm["cubin"])
            cubin.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
            report = subprocess.run(command, check=True, capture_output=True, text=True)
        return _number(r"STACK:(\d+)", report.stdout + report.stderr)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} is not in what the compiler reports: {text[:200]!r}")
    return int(found[1])


def gpu_target(arch: str) -> GPUTarget:
    """Triton's name of ``sm_90``, ``gfx950``, ..."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compile_launch(launch: Launch, arch: str) -> CompiledLaunch:
    """Compile as a call would: tensors are 16-byte aligned pointers, None and constants are compiled in."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if launch.overlap:
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=gpu_target(arch), options=options)
    return CompiledLaunch(launch.kernel.__name__, arch, compiled.metadata.shared, dict(compiled.asm), compiled.metadata)
