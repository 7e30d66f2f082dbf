"""What the FlyDSL kernels can run: the reasons it gives otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_compile.spec import GateFunction

Reason = tuple[str, str | None]

# Of hidden states and result: FlyDSL's name of the type.
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}
BLOCK = 32  # elements of one MXFP8 scale, and columns of the result that one tile computes
LANES = 64  # of a wave, and threads of a workgroup


def activations_reason(activations: str) -> Reason | None:
    if activations != "bf16":
        return None
    return "the scaled MFMA reads activations in MXFP8, activations='bf16' is not possible", "activations='auto'"


def gate_reasons(gate: GateFunction) -> Iterator[Reason]:
    if not gate.gated:
        yield "needs an up projection (gated=True)", None
    if gate.activation != "silu":
        yield f"has silu only, not {gate.activation}", None
    if gate.gate_softcap is not None or gate.up_softcap is not None:
        yield "has no softcap", None


def size_reasons(hidden_size: int, intermediate_size: int) -> Iterator[Reason]:
    for name, size in (("H", hidden_size), ("I", intermediate_size)):
        if size % BLOCK:
            yield f"{name} must be a multiple of {BLOCK}, got {size}", None
