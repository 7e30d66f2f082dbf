"""A live module's gate function, recognised by tracing the module's own code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_compile.passes.fx_utils import Unproven
from moe_compile.passes.gate_callable import RecognisedGate, recognise
from moe_compile.spec import GateFunction

OAI = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)


def oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def in_place(columns: Tensor) -> Tensor:
    gate, up = columns.chunk(2, dim=-1)
    gate = gate.clone().clamp_(max=10.0)
    return torch.nn.functional.silu(gate).mul_(up.clamp(-10.0, 10.0))


KNOWN: list[tuple[Callable[[Tensor], Tensor], RecognisedGate]] = [
    (lambda x: oai(*x.chunk(2, dim=-1)), RecognisedGate(OAI, "concatenated", False)),
    (lambda x: oai(x[..., ::2], x[..., 1::2]), RecognisedGate(OAI, "interleaved", False)),
    (lambda x: oai(*reversed(x.chunk(2, dim=-1))), RecognisedGate(OAI, "concatenated", True)),
    (in_place, RecognisedGate(GateFunction(limit=10.0), "concatenated", False)),
    (
        lambda x: (torch.nn.SiLU()(x.chunk(2, -1)[0].float()) * x.chunk(2, -1)[1].float()).to(x.dtype),
        RecognisedGate(GateFunction(), "concatenated", False),
    ),
    (lambda x: torch.relu(x).square(), RecognisedGate(GateFunction("relu2", gated=False), "concatenated", False)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("function", "expected"), KNOWN, ids=[str(i) for i in range(len(KNOWN))])
def test_known(function: Callable[[Tensor], Tensor], expected: RecognisedGate, dtype: torch.dtype) -> None:
    assert recognise(function, 96, dtype) == expected


UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another function": (lambda x: torch.tanh(x), "none of the known ones"),
    "reads other rows": (lambda x: x.cumsum(0), "cumsum"),
    "a branch on values": (lambda x: x if bool(x.sum() > 0) else -x, "cannot be traced"),
    "a parameter": (lambda x: torch.relu(x) * torch.nn.Parameter(torch.ones(96)), "depends on"),
    "a constant": (lambda x: torch.ones(4, 96), "not a pointwise operator"),
    "too few columns": (lambda x: x[:, :31], "neither a gate and an up half"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name: str) -> None:
    function, reason = UNKNOWN[name]
    with pytest.raises(Unproven, match=reason):
        recognise(function, 96)


def test_inside_of_a_compile_sizes_stay_numbers() -> None:
    found: list[RecognisedGate] = []

    @torch.compiler.assume_constant_result
    def prove() -> None:
        found.append(recognise(KNOWN[0][0], 64))

    def model(x: Tensor) -> Tensor:
        prove()
        return x + 1

    torch.compile(model, backend="eager", dynamic=True, fullgraph=True)(torch.ones(3))
    assert found == [KNOWN[0][1]]
