"""Compiles FlyDSL launchers for gfx950 where there is no GPU and no ROCm, for the emulator in ``gfx950``."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gfx950.linker import write_rocm_path


@contextmanager
def flydsl_target(folder: Path) -> Iterator[None]:
    """FlyDSL compiles for gfx950 inside, with a linker and a cache of its own in ``folder``."""
    write_rocm_path(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROCM_PATH", str(folder))
        patch.setenv("FLYDSL_GPU_ARCH", "gfx950")
        patch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(folder / "cache"))
        yield


def code_object(compiled: Any) -> bytes:
    """The ELF inside what ``flyc.compile`` returned. FlyDSL has no public way to it before it is loaded on a GPU."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    found: list[bytes] = []

    def visit(operation: Any) -> Any:
        if operation.name == "gpu.binary":
            found.extend(bytes(gpu.ObjectAttr(each).object) for each in ir.ArrayAttr(operation.attributes["objects"]))
        return ir.WalkResult.ADVANCE

    with _create_mlir_context():
        ir.Module.parse(compiled._keepalive.ir).operation.walk(visit)
    if len(found) != 1:
        raise ValueError(f"expected one code object in the compiled launcher, found {len(found)}")
    return found[0]


def placeholder(tensor: torch.Tensor) -> Any:
    """How a launcher takes a tensor: 16-byte aligned, sizes known at run time only."""
    import flydsl.compiler as flyc

    return flyc.from_torch_tensor(tensor, assumed_align=16).mark_layout_dynamic()


def kernel_arguments(*tensors: torch.Tensor) -> list[Any]:
    """What the emulator passes for contiguous 2-D tensors: each a pointer, then rows, columns and stride by value."""
    arguments: list[Any] = []
    for tensor in tensors:
        rows, columns = tensor.shape
        arguments += [tensor.numpy(), struct.pack("<iiq", rows, columns, columns)]
    return arguments
