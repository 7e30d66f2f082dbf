"""Gate functions against the discriminating vectors of the model families, worked out in float64 by hand."""

import json
import math
from typing import Any

import pytest
import torch

from moe_compile.spec import ACTIVATIONS, ExpertSpec, GateFunction

OAI = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)


def evaluate(gate: GateFunction, g: float, u: float) -> float:
    return float(gate(torch.tensor(g, dtype=torch.float64), torch.tensor(u, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("gate", "at_12_minus_12", "at_minus_1_2"),
    [
        pytest.param(GateFunction(), -143.9991, -0.53788, id="silu"),
        pytest.param(GateFunction(limit=10.0), -99.9955, -0.53788, id="DeepSeek-V4"),
        pytest.param(OAI, -41.9997, -0.46261, id="MiniMax-M3 and gpt-oss"),
        pytest.param(GateFunction(limit=7.0), -48.9554, -0.53788, id="silu, clamped before"),
        pytest.param(GateFunction(limit=7.0, limit_after=True), -49.0, -0.53788, id="Step-3"),
        pytest.param(GateFunction(gate_softcap=4.0, up_softcap=25.0), -44.4034, -0.52583, id="Inkling-2"),
        pytest.param(GateFunction(activation="gelu_tanh"), -144.0, -0.31762, id="Gemma-4"),
    ],
)
def test_the_known_families_at_the_two_points_that_tell_them_apart(
    gate: GateFunction, at_12_minus_12: float, at_minus_1_2: float
) -> None:
    assert evaluate(gate, 12.0, -12.0) == pytest.approx(at_12_minus_12, abs=5e-5)
    assert evaluate(gate, -1.0, 2.0) == pytest.approx(at_minus_1_2, abs=5e-6)


@pytest.mark.parametrize(
    ("activation", "g", "expected"),
    [
        ("gelu", -1.0, -0.5 * (1 + math.erf(-1 / math.sqrt(2)))),
        ("relu", 3.0, 3.0),
        ("relu", -3.0, 0.0),
        ("relu2", 3.0, 9.0),
        ("relu2", -3.0, 0.0),
    ],
)
def test_the_other_activations(activation: str, g: float, expected: float) -> None:
    assert evaluate(GateFunction(activation=activation), g, 1.0) == pytest.approx(expected, rel=1e-12)


def test_without_a_gate_there_is_no_up() -> None:
    gate = GateFunction(activation="relu2", gated=False)
    assert gate(torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]
    with pytest.raises(ValueError, match="gated=False, but up is given"):
        gate(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="gated=True, but up is missing"):
        GateFunction()(torch.ones(1))


def test_the_dtype_of_the_gate_is_kept() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    assert OAI(x, x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "swish"}, "activation: got 'swish', choices are silu, gelu"),
        ({"activation": "relu", "alpha": 2.0}, "belong to silu, got activation='relu'"),
        ({"activation": "gelu", "gate_softcap": 4.0}, "belong to silu, got activation='gelu'"),
        ({"limit": 0.0}, "limit must be positive or None, got 0.0"),
        ({"limit": math.nan}, "limit must be positive or None, got nan"),
        ({"gate_softcap": -1.0}, "gate_softcap must be positive or None, got -1.0"),
        ({"up_softcap": 0.0}, "up_softcap must be positive or None"),
        ({"limit_after": True}, "limit_after=True needs a limit"),
        ({"gated": False, "up_offset": 1.0}, "has no up_offset and no up_softcap"),
        ({"gated": False, "up_softcap": 1.0}, "has no up_offset and no up_softcap"),
    ],
)
def test_a_gate_function_that_makes_no_sense_is_refused_where_it_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GateFunction(**arguments)


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (GateFunction(), "silu"),
        (OAI, "silu(alpha=1.702, limit=7, up_offset=1)"),
        (GateFunction(activation="relu2", gated=False), "relu2(gated=False)"),
        (GateFunction(limit=7.0, limit_after=True), "silu(limit=7, limit_after=True)"),
    ],
)
def test_str_shows_only_what_differs_from_the_default(gate: GateFunction, text: str) -> None:
    assert str(gate) == text


def test_every_activation_can_be_evaluated() -> None:
    for activation in ACTIVATIONS:
        assert evaluate(GateFunction(activation=activation), 0.0, 5.0) == 0.0


def test_spec_sizes_and_json() -> None:
    spec = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, gate=OAI)
    assert spec.sizes == "H64 I96 E8 k2"
    data = json.loads(json.dumps(spec.to_dict()))
    assert data["gate"]["alpha"] == 1.702
    assert data["gate"]["limit"] == 7.0
    assert data["activation_dtype"] == "bfloat16"
    assert data["routing_dtype"] == "float32"
    assert data["num_experts"] == 8


def test_spec_refuses_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="gate_up_layout: got 'blocked', choices are concatenated, interleaved"):
        ExpertSpec(num_experts=1, hidden_size=1, intermediate_size=1, top_k=1, gate_up_layout="blocked")
