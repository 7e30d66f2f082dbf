"""Gate functions: each family of models is recognised in every spelling, and nothing near it is taken for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_modules import GATES, UNGATED, Experts, Spelling, random_inputs
from graph_capture import capture, check_rewrite, only_match, only_miss
from hooked_experts import Hook, capture_hooked, check_miss
from torch import Tensor

from moe_compile.passes import gate_function, gate_region
from moe_compile.passes.find_experts import MoEMatch
from moe_compile.spec import GateFunction

Gate = Callable[[Tensor, Tensor], Tensor]


def of_halves(gate: Gate) -> dict[str, Hook]:
    """The gate function in place of the usual one, on concatenated halves."""
    return {"inner": lambda value, e: gate(*e["gate_up"].chunk(2, dim=-1))}


def found_gate(gate: Gate, **options: Any) -> GateFunction:
    return only_match(check_rewrite(capture_hooked(of_halves(gate), "batched_mm", **options))).spec.gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
@pytest.mark.parametrize("name", [*GATES, *(f"ungated {name}" for name in UNGATED)])
def test_families(name: str, decomposed: bool, dtype: torch.dtype) -> None:
    gated = not name.startswith("ungated")
    spelling = Spelling("batched_mm", gate=name.removeprefix("ungated "), gated=gated)
    module = Experts(spelling, dtype=dtype)
    match = only_match(check_rewrite(capture(module, list(random_inputs(module)), decomposed=decomposed)))
    assert match.spec.gate == module.gate


@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["swiglu_oai", "silu", "inkling2"])
def test_layouts(name: str, interleaved: bool, up_first: bool, decomposed: bool) -> None:
    spelling = Spelling("batched_mm", gate=name, interleaved=interleaved, up_first=up_first)
    module = Experts(spelling, dtype=torch.float32)
    spec = only_match(check_rewrite(capture(module, list(random_inputs(module)), decomposed=decomposed))).spec
    assert (spec.gate_up_layout, spec.up_first) == ("interleaved" if interleaved else "concatenated", up_first)


OTHER_SPELLINGS: dict[str, tuple[Gate, GateFunction]] = {
    "sigmoid times gate": (lambda g, u: torch.sigmoid(g) * g * u, GateFunction()),
    "tanh for sigmoid": (lambda g, u: g * 0.5 * (1 + torch.tanh(0.5 * g)) * u, GateFunction()),
    "quick gelu": (lambda g, u: g * torch.sigmoid(1.702 * g) * u, GateFunction(alpha=1.702)),
    "erf gelu by hand": (lambda g, u: 0.5 * g * (1 + torch.erf(g * 2**-0.5)) * u, GateFunction("gelu")),
    "tanh gelu by hand": (
        lambda g, u: 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u,
        GateFunction("gelu_tanh"),
    ),
    "minimum for clamp": (
        lambda g, u: F.silu(torch.minimum(g, torch.full_like(g, 5.0))) * u.clamp(-5.0, 5.0),
        GateFunction(limit=5.0),
    ),
    "up distributed": (lambda g, u: F.silu(g) * u + F.silu(g), GateFunction(up_offset=1.0)),
    "negative offset": (lambda g, u: F.silu(g) * (u - 0.25), GateFunction(up_offset=-0.25)),
    "relu squared, gated": (lambda g, u: F.relu(g) ** 2 * u, GateFunction("relu2")),
    "everything at once": (
        lambda g, u: (
            (3 * torch.tanh(g.clamp(max=6.0) / 3) * torch.sigmoid(1.3 * g.clamp(max=6.0)))
            * (9 * torch.tanh(u.clamp(-6.0, 6.0) / 9) + 0.5)
        ),
        GateFunction(alpha=1.3, limit=6.0, up_offset=0.5, gate_softcap=3.0, up_softcap=9.0),
    ),
}


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_other_spellings(name: str, decomposed: bool) -> None:
    gate, expected = OTHER_SPELLINGS[name]
    assert found_gate(gate, decomposed=decomposed) == expected


@pytest.mark.parametrize("alpha", [0.5, 1.01, 1.702, 1.7020001, 2.0])
@pytest.mark.parametrize("limit", [0.5, 6.999, 7.0, 30.0])
def test_the_constants_are_the_graphs_own(alpha: float, limit: float) -> None:
    gate = found_gate(
        lambda g, u: g.clamp(max=limit) * torch.sigmoid(alpha * g.clamp(max=limit)) * u.clamp(-limit, limit)
    )
    assert gate == GateFunction(alpha=alpha, limit=limit)


COMPARES = ("where", "threshold", "removed", "changes")
UNKNOWN: dict[str, Gate] = {
    "factor": lambda g, u: 1.01 * F.silu(g) * u,
    "where for clamp": lambda g, u: F.silu(torch.where(g > 5.0, 5.0, g)) * u.clamp(-5.0, 5.0),
    "derived threshold": lambda g, u: torch.where(g * 0.01 > 500.0, 0.0, F.silu(g)) * u,
    "derived limit": lambda g, u: F.silu((g * 0.001).clamp(max=800.0) * 1000.0) * u,
    "NaN removed": lambda g, u: torch.where(u == u, F.silu(g) * u, 0.0),
    "overflow removed": lambda g, u: torch.where((F.silu(g) * u).abs() < 3e38, F.silu(g) * u, 0.0),
    "small factor": lambda g, u: (1 + 1e-6) * F.silu(g) * u,
    "two limits": lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-6.0, 6.0),
    "nearly two limits": lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-7.001, 7.001),
    "lower limit of the gate": lambda g, u: F.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0),
    "one-sided limit of up": lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(max=7.0),
    "limit of the gate alone": lambda g, u: F.silu(g.clamp(max=7.0)) * u,
    "limit of up alone": lambda g, u: F.silu(g) * u.clamp(-7.0, 7.0),
    "alpha in one place": lambda g, u: F.silu(1.702 * g) * u,
    "offset of the gate": lambda g, u: F.silu(g + 1.0) * u,
    "offset inside the limit": lambda g, u: F.silu(g.clamp(max=7.0)) * (u + 1.0).clamp(-7.0, 7.0),
    "offset of the product": lambda g, u: F.silu(g) * u + 1.0,
    "sum": lambda g, u: F.silu(g) + u,
    "up squared": lambda g, u: F.silu(g) * u * u,
    "gate without up": lambda g, u: F.silu(g),
    "up without gate": lambda g, u: u,
    "both halves activated": lambda g, u: F.silu(g) * F.silu(u),
    "gate in both": lambda g, u: F.silu(g) * g,
    "softplus": lambda g, u: F.softplus(g) * u,
    "leaky": lambda g, u: F.leaky_relu(g, 1e-3) * u,
    "mish": lambda g, u: F.mish(g) * u,
    "changes at 50": lambda g, u: torch.where(g * 0.02 > 1.0, g, F.silu(g) * u),
    "changes at 1000": lambda g, u: torch.where(g * 0.001 > 1.0, 0.0, F.silu(g) * u),
    "changes near zero": lambda g, u: torch.where(g.abs() < 1e-3, 0.0, F.silu(g) * u),
    "columns reversed in pairs": lambda g, u: F.silu(g) * u.view(-1, 8, 2)[..., [0, 1]].flatten(-2) + 0 * u[..., :1],
    "up of the next column": lambda g, u: F.silu(g) * torch.cat([u[:, 1:], u[:, :1]], -1),
    "thirds": lambda g, u: F.silu(torch.cat([g, u], -1)[:, 4:20]) * u,
    "gelu approximation of another constant": lambda g, u: (
        0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.0447 * g**3))) * u
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_unknown_functions_are_left_alone(name: str, decomposed: bool) -> None:
    reason = "the gate function is none of the known ones"
    if any(word in name for word in COMPARES) or (decomposed and name in ("softplus", "leaky", "mish")):
        reason = "compares, so that evaluating it proves nothing"
    if name in ("columns reversed in pairs", "up of the next column", "thirds"):
        reason = "not a pointwise operator"
    check_miss(reason, capture_hooked(of_halves(UNKNOWN[name]), "batched_mm", decomposed=decomposed))


def test_the_reason_names_operators_and_constants() -> None:
    captured = capture_hooked(of_halves(lambda g, u: 1.01 * F.silu(g) * u), "batched_mm")
    check_miss("(operators: split, getitem, silu, mul; constants: 1.01)", captured)


def _inner(function: Callable[[Tensor, dict[str, Any]], Tensor]) -> dict[str, Hook]:
    return {"inner": function}


def _silu(e: dict[str, Any]) -> Any:
    gate, up = e["gate_up"].chunk(2, dim=-1)
    return F.silu(gate) * up


MISSES: dict[str, tuple[str, dict[str, Hook]]] = {
    "softmax": ("is not a pointwise operator", of_halves(lambda g, u: g.softmax(-1) * u)),
    "norm": ("is not a pointwise operator", of_halves(lambda g, u: F.silu(g) * u / u.pow(2).mean(-1, keepdim=True))),
    "weighted before the down projection": (
        "is not a pointwise operator",
        _inner(lambda v, e: v * e["topk_weights"].reshape(-1)[e["perm"]].unsqueeze(-1)),
    ),
    "down projection of the hidden states": (
        "is not a pointwise operator",
        _inner(lambda v, e: e["x"][:, :16] + e["x"][:, 16:]),
    ),
    "too many constants": (
        "7 constants, more than any known one",
        of_halves(lambda g, u: (((((g + 2) * 3 + 4) * 5 + 6) * 7) + 8) * u),
    ),
    "bias after the activation": (
        "a bias is added after the up projection was changed",
        {"gate_up": lambda v, e: v * 2.0},
    ),
    "two biases": (
        "more than one bias is added to the up projection",
        {"gate_up": lambda v, e: v + e["self"].gate_up_proj_bias[e["sorted_ids"]]},
    ),
    "rows transposed": ("moves rows", _inner(lambda v, e: F.silu(v.transpose(0, 1)).transpose(0, 1))),
    "rows shifted": (
        "is not a pointwise operator",
        _inner(lambda v, e: v.roll(1, 0)),
    ),
    "rows merged": ("moves rows", _inner(lambda v, e: F.silu(v.view(6, 32)).view(12, 16))),
    "converted to integers": ("converts to torch.int32", _inner(lambda v, e: v.int().float())),
    "rounded to float8": ("converts to torch.float8_e4m3fn", _inner(lambda v, e: v.to(torch.float8_e4m3fn).float())),
}


@pytest.mark.parametrize("name", MISSES)
def test_left_alone(name: str) -> None:
    reason, hooks = MISSES[name]
    options: dict[str, Any] = {"bias": True} if "bias" in name else {}
    check_miss(reason, capture_hooked(hooks, **options))


def test_other_widths_are_left_alone() -> None:
    """A down projection of 12 columns out of 32."""
    hooks: dict[str, Hook] = {
        "inner": lambda v, e: v[:, :8],
        "down_weight": lambda v, e: e["others"][0],
    }
    captured = capture_hooked(hooks, "batched_mm", others=[torch.randn(4, 32, 8)])
    check_miss("32 columns become 8: neither", captured)


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_alpha_as_a_tensor_is_left_alone(form: str) -> None:
    hooks = _inner(lambda v, e: v * e["others"][0])
    check_miss("reads another input of the graph", capture_hooked(hooks, form, others=[torch.tensor(1.7)]))


def test_separate_gate_and_up_weights_are_left_alone() -> None:
    def inner(value: Tensor, e: dict[str, Any]) -> Tensor:
        x = e["x"].unsqueeze(-1)
        gate, up = (torch.bmm(weight[e["ids"]], x).squeeze(-1) for weight in e["others"])
        return F.silu(gate) * up

    others = [torch.randn(4, 16, 32), torch.randn(4, 16, 32)]
    check_miss("separate gate and up weights", capture_hooked(_inner(inner), "batched_mm", others=others))


def test_no_activation_is_left_alone() -> None:
    hooks: dict[str, Hook] = {"inner": lambda v, e: e["gate_up"], "down_weight": lambda v, e: e["others"][0]}
    captured = capture_hooked(hooks, "batched_mm", others=[torch.randn(4, 32, 32)])
    check_miss("none of the known ones", captured)


def test_an_unknown_function_of_many_constants_is_given_up_in_a_second() -> None:
    def gate(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g * 2.0 + 3.0) * (u * 4.0 + 5.0).clamp(-6.0, 7.0)

    captured = capture_hooked(of_halves(gate), "batched_mm", intermediate=3072, hidden=8, experts=2, tokens=2)
    start = time.process_time()
    miss = only_miss(captured.find())
    assert time.process_time() - start < 1.0
    assert "constants: 2, 3, 4, 5, 6, 7)" in miss.reason


def test_a_known_function_of_wide_layers_is_found_in_a_second() -> None:
    captured = capture_hooked({}, "batched_mm", gate="swiglu_oai", intermediate=3072, hidden=8, experts=2, tokens=2)
    captured.find()
    start = time.process_time()
    only_match(captured.find())
    assert time.process_time() - start < 1.0


def test_twin_layers_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = gate_function._search

    def counted(region: gate_region.Region, constants: list[float]) -> Any:
        searches.append(region)
        return search(region, constants)

    monkeypatch.setattr(gate_function, "_search", counted)
    modules = torch.nn.ModuleList([Experts(Spelling("batched_mm"), dtype=torch.float32, seed=i) for i in range(3)])

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = modules

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, ids, weights)
            return x

    found = check_rewrite(capture(Layers(), list(random_inputs(modules[0]))))  # type: ignore[arg-type]
    assert sum(isinstance(one, MoEMatch) for one in found) == 3
    assert len(searches) == 1


def test_layers_of_different_limits_are_told_apart() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("deepseek_v4", "swiglu_oai", "step3p7", "silu")
            self.layers = torch.nn.ModuleList(
                [Experts(Spelling("batched_mm", gate=name), dtype=torch.float32) for name in names]
            )

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, ids, weights)
            return x

    layers = Layers()
    captured = capture(layers, list(random_inputs(layers.layers[0])))  # type: ignore[arg-type]
    found = check_rewrite(captured, tolerance=1e-5)
    assert [one.spec.gate for one in found if isinstance(one, MoEMatch)] == [layer.gate for layer in layers.layers]
