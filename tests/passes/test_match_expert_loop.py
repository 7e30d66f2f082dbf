"""Loops over all experts of stacked weights: found when every expert is there once with its own tokens and weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_loops import E, LoopedExperts, Steps, capture_loop, routing
from graph_capture import TOLERANCE, check_rewrite, only_match, only_miss, relative_error
from graph_edits import also_return
from torch._functorch.aot_autograd import aot_module_simplified

from moe_compile import report
from moe_compile.passes.find_experts import MoEMatch, find_experts
from moe_compile.passes.rewrite import rewrite

FORMS = ["gathered", "dense"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
@pytest.mark.parametrize("transposed", [False, True], ids=["(E, N, K)", "(E, K, N)"])
def test_found(form: str, decomposed: bool, transposed: bool) -> None:
    match = only_match(check_rewrite(capture_loop(form, decomposed, transposed=transposed)))
    assert (match.form, match.spec.num_experts, match.spec.top_k) == ("loop", E, 2)
    assert match.spec.transposed == transposed


@pytest.mark.parametrize("form", FORMS)
def test_found_in_bf16_with_any_number_of_tokens(form: str) -> None:
    only_match(check_rewrite(capture_loop(form, dtype=torch.bfloat16, dynamic=True)))


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_the_experts_does_not_matter(form: str) -> None:
    only_match(check_rewrite(capture_loop(form, experts=[2, 0, 3, 1])))


GUARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "an expert skipped": (r"leaves out the experts \[3\] of 4", {"experts": [0, 1, 2]}),
    "an expert twice": ("expert 1 is in the sum more than once", {"experts": [0, 1, 2, 3, 1]}),
    "ids shifted": ("computes the tokens of id", {"id_of": lambda e, v: (v + 1) % E}),
    "up weights of another expert": ("the up projection is expert", {"up_of": lambda e, v: (v + 1) % E}),
    "down weights of another expert": ("the up projection is expert", {"down_of": lambda e, v: E - 1 - v}),
    "both weights of another expert": (
        "computes the tokens of id",
        {"up_of": lambda e, v: E - 1 - v, "down_of": lambda e, v: E - 1 - v},
    ),
    "another gate function for one expert": (
        "differ in more than their weights",
        {"activation": lambda e, g, u: (F.gelu(g) if e == 2 else F.silu(g)) * u},
    ),
    "gate and up swapped for one expert": (
        "differ in more than their weights",
        {"activation": lambda e, g, u: F.silu(u) * g if e == 1 else F.silu(g) * u},
    ),
    "a mask by value in the gate function": (
        "a loop over experts|compares|none of the known ones",
        {"activation": lambda e, g, u: torch.where(g > 0, g, u)},
    ),
    "hidden states of other tokens": ("hidden states|input is not a choice", {"inputs": lambda e, v: v.flip(0)}),
    "hidden states scaled first": ("hidden states|input is not a choice", {"inputs": lambda e, v: v * 2}),
    "weighted twice": (
        "a loop over experts|not multiplied by|factor is not",
        {"factors": lambda e, v: v * v},
    ),
    "weights scaled": (
        "not multiplied by the routing weights|an expert's factor is not a sum over the slots of a token",
        {"factors": lambda e, v: v * 0.5},
    ),
    "weights rounded in between": (
        "the routing weights are cast more than once",
        {"factors": lambda e, v: v.bfloat16().float()},
    ),
    "one factor a column": (
        "not multiplied by one number a row",
        {"factors": lambda e, v: v.expand(-1, 32)},
    ),
    "a factor that is no routing weight": (
        "not multiplied by the routing weights|an expert's factor is not a sum over the slots of a token",
        {"factors": lambda e, v: torch.ones_like(v)},
    ),
    "another mask for the weights": (
        "not multiplied by the routing weights|an expert's factor is not a sum over the slots of a token",
        {"factors": lambda e, v: v.flip(0)},
    ),
    "hidden states of the dtype that one expert rounds to": (
        "differ in more than their weights|input is not a choice",
        {"inputs": lambda e, v: v.bfloat16().float() if e == 1 else v},
    ),
    "result weighted again": ("a loop over experts", {"result": lambda e, v: v * 0.5}),
    "result through an activation": ("a loop over experts", {"result": lambda e, v: torch.relu(v)}),
}
GATHERED_GUARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights of another slot": ("not multiplied by the routing weights", {"slots": lambda e, v: 1 - v}),
    "added to other rows": ("not the tokens that its mask selects", {"token": lambda e, v: v.flip(0)}),
    "overwritten instead of added": (
        "a loop over experts",
        {"add": lambda out, token, rows: out.index_copy(0, token, rows)},
    ),
    "added twofold": ("a loop over experts", {"add": lambda out, token, rows: out.index_add(0, token, rows, alpha=2)}),
}
CASES = [
    *(
        (form, name, *guard)
        for form in FORMS
        for name, guard in GUARDS.items()
        if form == "dense" or "flip" not in name
    ),
    *(("gathered", name, *guard) for name, guard in GATHERED_GUARDS.items()),
]


@pytest.mark.parametrize(("form", "name", "reason", "steps"), CASES, ids=[f"{c[0]}, {c[1]}" for c in CASES])
def test_refused(form: str, name: str, reason: str, steps: dict[str, Any]) -> None:
    miss = only_miss(capture_loop(form, **steps).find())
    assert miss.form == "loop"
    assert re.search(reason, miss.reason), miss.reason


@pytest.mark.parametrize("form", FORMS)
def test_an_intermediate_value_that_is_used_elsewhere_is_refused(form: str) -> None:
    captured = capture_loop(form)
    captured = also_return(captured, captured.nodes(torch.ops.aten.mm)[1])
    assert "used outside the block" in only_miss(captured.find()).reason


@pytest.mark.parametrize("form", FORMS)
def test_through_torch_compile(form: str) -> None:
    module, inputs = LoopedExperts(form, Steps(), torch.float32, False), routing()
    options = {"inductor": False, "strict": True, "moe_backend": "reference"}
    compiled = torch.compile(module, backend="moe_rocm", options=options, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert relative_error(compiled(*inputs), module(*inputs)) < TOLERANCE[torch.float32]
    (layer,) = report.merge(report.reports()).layers
    assert layer.rewritten


def test_no_search_for_tokens_is_left_in_dynamos_graph() -> None:
    """Its assertions on the number of tokens of each expert would keep one search, and a wait for it, alive each."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        (match,) = find_experts(module.graph)
        assert isinstance(match, MoEMatch), match.reason
        assert len(match.assertions) == 2 * E
        rewrite(module.graph, match, "reference", "auto")
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
        graphs.append(module)
        return module

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return aot_module_simplified(module, inputs, fw_compiler=compiler)

    module, inputs = LoopedExperts("gathered", Steps(), torch.float32, False), routing()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert relative_error(compiled(*inputs), module(*inputs)) < TOLERANCE[torch.float32]
    (graph,) = (found.graph for found in graphs)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
