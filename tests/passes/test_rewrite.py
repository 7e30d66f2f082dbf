"""What stands in a graph after a rewrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import Experts, Spelling, random_inputs
from graph_capture import capture, check_rewrite, only_match, rewrite_all
from hooked_experts import HookedExperts, capture_hooked
from torch import Tensor

from moe_compile.kernels.ops import is_expert_operator
from moe_compile.passes.rewrite import rewrite

aten = torch.ops.aten


def operators(nodes: Any) -> list[Any]:
    return [node for node in nodes if is_expert_operator(node.target)]


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_nothing_of_the_block_is_left(form: str, decomposed: bool) -> None:
    module = Experts(Spelling(form, gate="swiglu_oai", bias=True))
    captured = capture(module, list(random_inputs(module)), decomposed=decomposed, dynamic=(0, 1, 2))
    result, _ = rewrite_all(captured)
    calls = [node.target for node in result.graph.nodes if node.op == "call_function"]
    assert len(operators(result.graph.nodes)) == 1
    assert len(calls) == 1
    (node,) = operators(result.graph.nodes)
    assert node.args == (*result.placeholders[4:], *result.placeholders[:2])
    assert node.kwargs == {
        "alpha": 1.702,
        "limit": 7.0,
        "up_offset": 1.0,
        "gate_up_bias": result.placeholders[2],
        "down_bias": result.placeholders[3],
    }


def test_the_operator_is_annotated_like_the_root() -> None:
    module = Experts()
    captured = capture(module, list(random_inputs(module)), dynamic=(0, 1, 2))
    match = only_match(captured.find())
    match.root.meta["stack_trace"] = "somewhere"
    node = rewrite(captured.graph, match, "reference", "mxfp8")
    assert node.meta["val"].shape == match.root.meta["val"].shape
    assert node.meta["val"].dtype == match.root.meta["val"].dtype
    assert node.meta["val"].is_contiguous()
    assert node.meta["stack_trace"] == "somewhere"
    assert node.kwargs == {"activations": "mxfp8"}
    assert node.args[0] is match.hidden_states


def test_routing_in_another_shape_is_reshaped() -> None:
    """Ids and weights that come flat, (S,)."""

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts(Spelling("batched_mm"), dtype=torch.float32)

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = self.experts(x, ids.view(-1, 2), weights.view(-1, 2))
            return out

    module = Flat()
    x, ids, weights = random_inputs(module.experts)
    captured = capture(module, [x, ids.reshape(-1), weights.reshape(-1)])
    only_match(check_rewrite(captured))
    (node,) = operators(rewrite_all(captured)[0].graph.nodes)
    assert [argument.meta["val"].shape for argument in node.args[1:3]] == [(6, 2), (6, 2)]


def test_a_cast_after_the_routing_is_made_before_the_operator() -> None:
    module = Experts(Spelling(cast_weights=True))
    result, found = rewrite_all(capture(module, list(random_inputs(module)), dynamic=(0, 1, 2)))
    assert only_match(found).spec.routing_dtype == torch.bfloat16
    (node,) = operators(result.graph.nodes)
    assert node.args[2].target is torch.ops.prims.convert_element_type.default
    assert node.args[2].meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_hidden_states_cast_after_their_routing_are_cast_before_the_operator(form: str) -> None:
    """Under autocast the hidden states are float32 and the weights bfloat16."""
    hooks = {"x": lambda v, e: v.bfloat16()}
    module = HookedExperts(form, hooks, dtype=torch.bfloat16)
    x, ids, weights = random_inputs(module)
    captured = capture(module, [x.float(), ids, weights])
    spec = only_match(check_rewrite(captured, tolerance=1.2e-2)).spec
    assert (spec.activation_dtype, spec.out_dtype) == (torch.bfloat16, torch.float32)
    (node,) = operators(rewrite_all(captured)[0].graph.nodes)
    assert node.args[0].target is torch.ops.prims.convert_element_type.default


def test_the_sum_keeps_its_shape() -> None:
    captured = capture_hooked({"sum": lambda v, e: e["slots"].sum(1, keepdim=True)}, dynamic=True)
    only_match(check_rewrite(captured))
