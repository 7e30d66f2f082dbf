"""What the FlyDSL kernels can run: the reasons it gives otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_compile.spec import GateFunction

Reason = tuple[str, str | None]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 32


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
