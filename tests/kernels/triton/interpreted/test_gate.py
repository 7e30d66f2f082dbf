import pytest
import torch
from expert_cases import GATES
from triton_probes import evaluate_gate


@pytest.mark.parametrize("name", GATES)
def test_equals_the_gate_function(name: str) -> None:
    function = GATES[name]
    # Around 0 (where tanh and erf cancel), around the limits, and far out; gate and up in different orders.
    points = torch.cat([torch.linspace(-30, 30, 601), torch.logspace(-12, 1, 100), -torch.logspace(-12, 1, 100)])
    up = points.flip(0) * 1.25
    actual = evaluate_gate(function, points, up)
    expected = function(points.double(), up.double() if function.gated else None)
    # gelu multiplies 1 + erf(gate), which cancels for negative gates, in torch too; up to 40 * 5 here.
    atol = 4e-6 if function.activation == "gelu" else 1e-6
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=atol)
    assert actual[601].item() == pytest.approx(expected[601].item(), rel=3e-6, abs=1e-30), "1e-12 keeps its digits"


@pytest.mark.parametrize("name", GATES)
def test_nan_and_infinity_pass_as_in_torch(name: str) -> None:
    function = GATES[name]
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    gate, up = (grid.flatten() for grid in torch.meshgrid(special, special, indexing="ij"))
    actual = evaluate_gate(function, gate, up)
    # In float64, because torch's vectorised float32 gelu(inf) is NaN on a CPU.
    expected = function(gate.double(), up.double() if function.gated else None)
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=0, equal_nan=True)
