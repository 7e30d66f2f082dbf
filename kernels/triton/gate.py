# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The gate function on the device: one function for every `GateFunction`, each field a compile-time constant."""

from typing import Any

import triton
import triton.language as tl

from moe_compile.spec import GateFunction


def gate_constants(gate: GateFunction) -> dict[str, Any]:
    """The constants by which a kernel knows its gate function, under the names of `apply_gate`'s parameters."""
    return {
        "GATED": gate.gated,
        "ACTIVATION": gate.activation,
        "ALPHA": gate.alpha,
        "LIMIT": gate.limit,
        "LIMIT_AFTER": gate.limit_after,
        "UP_OFFSET": gate.up_offset,
        "GATE_SOFTCAP": gate.gate_softcap,
        "UP_SOFTCAP": gate.up_softcap,
    }


@triton.jit
def apply_gate(
    gate,
    up,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr,
    UP_SOFTCAP: tl.constexpr,
):
    """``A(gate) * U(up)`` in float32, step by step as `GateFunction` defines it; ``up`` is ignored without GATED.

    Every clamp is a comparison and a select, because the hardware's minimum and maximum drop NaN.
    """
    if LIMIT is not None:
        if not LIMIT_AFTER:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
    if ACTIVATION == "silu":
        factor = gate
        if GATE_SOFTCAP is not None:
            factor = GATE_SOFTCAP * tanh(gate / GATE_SOFTCAP)
        out = factor / (1.0 + tl.exp(-ALPHA * gate))
    elif ACTIVATION == "gelu":
        out = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2z), which does not cancel for negative z.
        out = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        out = tl.where(gate < 0.0, 0.0, gate)
        if ACTIVATION == "relu2":
            out = out * out
    if LIMIT_AFTER:
        out = tl.where(out > LIMIT, LIMIT, out)
    if GATED:
        if LIMIT is not None:
            up = tl.where(up > LIMIT, LIMIT, up)
            up = tl.where(up < -LIMIT, -LIMIT, up)
        if UP_SOFTCAP is not None:
            up = UP_SOFTCAP * tanh(up / UP_SOFTCAP)
        out = out * (up + UP_OFFSET)
    return out


@triton.jit
def tanh(x):
    """tanh in float32 from ``exp`` alone: Triton has none that works on NVIDIA, on AMD and in the interpreter.

    ``1 - 2 / (exp(2x) + 1)`` cancels near 0, so below 0.25 the Taylor series (next term: 8e-9 of the value) takes over.
    """
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(square < 0.0625, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
