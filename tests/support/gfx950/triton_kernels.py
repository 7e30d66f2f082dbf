"""Compile Triton kernels for gfx950, on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gfx950.run import RunStats


def compile_for_gfx950(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Sequence[str] = (),
    buffer_ops: bool = False,
    **options: Any,
) -> tuple[bytes, dict[str, Any]]:
    """Compile a @triton.jit function.

    Args:
        signature: the type of every argument that is not a constant, such as ``*fp32`` or ``i32``.
        constants: the constexpr arguments.
        aligned: the arguments that are multiples of 16, as Triton finds out at a launch.
        buffer_ops: every tensor is below 2 GiB, which makes Triton use buffer instructions.
        options: num_warps, num_stages, ...

    Returns:
        The code object, and the metadata for `run_kernel`.
    """
    names = list(function.arg_names)
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, name in enumerate(names):
        hints = [["tt.divisibility", 16]] if name in aligned else []
        hints += [["tt.pointer_range", 32]] if buffer_ops and types[name].startswith("*") else []
        if hints:
            attributes[(i,)] = hints
    source = ASTSource(fn=function, signature=types, constexprs=dict(constants), attrs=attributes)
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True, **options}
    compiled = triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=options)
    return compiled.asm["hsaco"], {**compiled.metadata._asdict(), "signature": types}


def scaled_mfma_count(stats: RunStats) -> int:
    """How many scaled MFMA a run executed: 0 if Triton fell back to bf16 MFMA, which it does without a warning."""
    return sum(count for opcode, count in stats["per_op"].items() if opcode.startswith("V_MFMA_SCALE"))
