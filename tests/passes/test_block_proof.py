"""The proof of a whole block: one test for each thing that must hold between its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import Experts, Spelling, random_inputs
from graph_capture import Captured, capture, check_rewrite, only_match, only_miss, rewrite_all
from graph_edits import also_return, finish, insert_after
from hooked_experts import Hook, capture_hooked, check_miss
from torch import Tensor

from moe_compile.passes.find_experts import MoEMatch, find_experts
from moe_compile.passes.near_misses import NearMiss

aten = torch.ops.aten
E = 4


def replace_weight(captured: Captured, which: int, value: Tensor) -> Captured:
    """Another tensor in place of a weight, in the graph and in the inputs."""
    fake = captured.placeholders[which].meta["val"]
    captured.placeholders[which].meta["val"] = fake.new_empty(value.shape, dtype=value.dtype, device=value.device)
    inputs = list(captured.inputs)
    inputs[which] = value
    return Captured(captured.module, tuple(inputs), captured.num_weights)


def test_weights_of_different_numbers_of_experts() -> None:
    hooks: dict[str, Hook] = {"up_weight": lambda v, e: e["others"][0]}
    captured = capture_hooked(hooks, "batched_mm", others=[torch.randn(E + 1, 32, 32)])
    check_miss("the projections have 5 and 4 experts", captured)


def test_weights_of_different_dtypes() -> None:
    captured = replace_weight(capture_hooked({}, "batched_mm"), 0, torch.randn(E, 32, 32).double())
    assert "weights differ in dtype" in only_miss(captured.find()).reason


def test_another_output_width() -> None:
    hooks: dict[str, Hook] = {
        "down_weight": lambda v, e: e["others"][0],
        "sum": lambda v, e: v,
    }
    captured = capture_hooked(hooks, "batched_mm", others=[torch.randn(E, 24, 16)])
    check_miss("the block maps 32 features to 24", captured)


def test_a_weight_that_is_no_parameter() -> None:
    captured = capture_hooked({}, "batched_mm")
    found = find_experts(captured.graph, set(captured.placeholders[:1]))
    assert "the expert weight arg1_1 is not a parameter or buffer" in only_miss(found).reason
    only_match(find_experts(captured.graph, None))  # nothing is known of the inputs


def test_a_bias_that_is_no_parameter() -> None:
    captured = capture_hooked({}, "batched_mm", bias=True)
    found = find_experts(captured.graph, set(captured.placeholders[:3]))
    assert "is not a parameter or buffer" in only_miss(found).reason


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_weights_without_block_scales(dtype: torch.dtype) -> None:
    captured = capture_hooked({}, "batched_mm")
    for which, sizes in ((0, (E, 32, 32)), (1, (E, 32, 16))):
        captured = replace_weight(captured, which, torch.zeros(sizes).to(dtype))
    assert f"the expert weight is {dtype} without block scales" in only_miss(captured.find()).reason


def test_weights_on_another_device() -> None:
    captured = replace_weight(capture_hooked({}, "batched_mm"), 1, torch.empty(E, 32, 16, device="meta"))
    captured.placeholders[1].meta["val"] = torch.empty(E, 32, 16, device="meta")
    assert "the expert weight is on meta, the hidden states on cpu" in only_miss(captured.find()).reason


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("value", ["gate_up", "inner", "out", "weighted"])
def test_every_interior_value_returned_is_left_alone(form: str, value: str) -> None:
    captured = capture_hooked({"sum": lambda v, e: (v, e[value])}, form)
    found = check_rewrite(captured)
    assert isinstance(found[0], NearMiss)
    assert len(found) == 1
    assert any(text in found[0].reason for text in ("used outside the block as well", "output of the graph"))


def test_an_interior_value_used_elsewhere_is_left_alone() -> None:
    captured = capture_hooked({"sum": lambda v, e: (v, e["inner"].sum(0))})
    check_miss("is used outside the block as well, by sum", captured)


def test_routing_values_used_elsewhere_do_not_matter() -> None:
    captured = capture_hooked({"sum": lambda v, e: (v, e["perm"], e["offsets"], e["weights"], e["x"].sum(0))})
    only_match(check_rewrite(captured))


def test_a_constant_shared_by_two_blocks_does_not_matter() -> None:
    module = Experts(Spelling("batched_mm", gate="silu_by_exp"), dtype=torch.float32)

    def twice(x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        return module(module(x, ids, weights), ids, weights)

    captured = capture(twice, list(random_inputs(module)), decomposed=True)
    assert all(isinstance(one, MoEMatch) or "not a graph input" in one.reason for one in captured.find())


def test_the_sum_may_be_used_many_times() -> None:
    captured = capture_hooked({"sum": lambda v, e: (v, v.relu(), v.sum())})
    only_match(check_rewrite(captured))


def test_a_bias_of_other_experts() -> None:
    hooks: dict[str, Hook] = {"up_bias": lambda v, e: e["self"].gate_up_proj_bias[e["others"][0]]}
    others = [torch.randint(0, E, (12,))]
    check_miss("the bias is read at other ids than the weight", capture_hooked(hooks, bias=True, others=others))
    hooks = {"down_bias": lambda v, e: e["self"].down_proj_bias[e["ids"]]}
    check_miss("the bias is read at other ids than the weight", capture_hooked(hooks, bias=True))


def test_a_bias_table_of_more_experts() -> None:
    hooks: dict[str, Hook] = {"down_bias": lambda v, e: e["others"][0][e["sorted_ids"]]}
    check_miss("the bias has shape (5, 32)", capture_hooked(hooks, bias=True, others=[torch.randn(5, 32)]))


def test_one_bias_for_all_experts_is_left_alone() -> None:
    hooks: dict[str, Hook] = {"down_bias": lambda v, e: e["self"].down_proj_bias[0]}
    captured = capture_hooked(hooks, bias=True)
    assert isinstance(check_rewrite(captured)[0], NearMiss)


def test_only_one_bias() -> None:
    hooks: dict[str, Hook] = {"down_bias": lambda v, e: v}
    assert only_match(check_rewrite(capture_hooked(hooks, bias=True))).down_bias is not None


SIZES: dict[str, tuple[str, dict[str, Hook], list[Tensor]]] = {
    "hidden states of more tokens": (
        "are not one row for each of the summed tokens",
        {"x": lambda v, e: e["others"][0].repeat_interleave(2, 0)[torch.arange(12)]},
        [torch.randn(9, 32)],
    ),
    "weights of more tokens": (
        "not (tokens, 2)",
        {"weights": lambda v, e: e["others"][0].reshape(-1)[torch.arange(12)]},
        [torch.rand(9, 2)],
    ),
    "ids of more tokens": (
        "not (tokens, 2)",
        {"ids": lambda v, e: e["others"][0].reshape(-1)[torch.arange(12)]},
        [torch.randint(0, E, (9, 2))],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    reason, hooks, others = SIZES[name]
    check_miss(reason, capture_hooked(hooks, "batched_mm", others=others))


def test_more_rows_than_slots() -> None:
    """All 12 slots are computed, and 5 of 6 tokens are summed."""

    def hook(value: Tensor, e: dict[str, Any]) -> Tensor:
        return torch.zeros(5, 32).index_add(0, torch.arange(10) // 2, e["weighted"][torch.arange(10)])

    others = [torch.randn(5, 32), torch.randint(0, E, (5, 2)), torch.rand(5, 2)]
    assert isinstance(check_rewrite(capture_hooked({"sum": hook}, "batched_mm", others=others))[0], NearMiss)


def test_ids_of_a_narrow_dtype() -> None:
    hooks: dict[str, Hook] = {"ids": lambda v, e: v.to(torch.int16).long()}
    assert only_match(check_rewrite(capture_hooked(hooks, "batched_mm"))).spec.num_experts == E


def test_rows_and_weights_in_other_orders_in_both_forms() -> None:
    hooks: dict[str, Hook] = {"weights": lambda v, e: e["topk_weights"].flip(1).reshape(-1)}
    captured = capture_hooked(hooks, "batched_mm")
    match = only_match(check_rewrite(captured))  # right: the flipped weights are the block's weights
    assert match.topk_weights.target is aten.flip.default


def test_a_scale_inserted_anywhere_is_never_a_wrong_rewrite() -> None:
    """Every float value of a block in turn, times two: found and right, or left alone."""
    for form in ("grouped_mm", "batched_mm"):
        count = len(capture_hooked({}, form).graph.nodes)
        outcomes: set[type] = set()
        for i in range(count):
            captured = capture_hooked({}, form)
            node = list(captured.graph.nodes)[i]
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point() and node.target is not aten.histc.default:
                check = insert_after(captured, node, aten.mul.Tensor, 2.0)
                outcomes.update(type(one) for one in check_rewrite(check))
        assert outcomes == {MoEMatch, NearMiss}


def test_every_value_returned_is_never_a_wrong_rewrite() -> None:
    for form in ("grouped_mm", "batched_mm"):
        for i in range(len(capture_hooked({}, form).graph.nodes)):
            captured = capture_hooked({}, form)
            node = list(captured.graph.nodes)[i]
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and "empty" not in node.name:
                check_rewrite(also_return(captured, node))


def test_swapped_operands_are_never_a_wrong_rewrite() -> None:
    """Every pair of values of one shape and dtype in turn: a user of the first reads the second instead."""
    captured = capture_hooked({}, dtype=torch.bfloat16)
    nodes = [n for n in captured.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    pairs = [
        (i, j)
        for i, first in enumerate(nodes)
        for j, second in enumerate(nodes[:i])
        if first.meta["val"].shape == second.meta["val"].shape and first.meta["val"].dtype == second.meta["val"].dtype
    ]
    checked = 0
    for i, j in pairs:
        for u in range(len(nodes[i].users)):
            edited = capture_hooked({}, dtype=torch.bfloat16)
            values = [n for n in edited.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
            user = list(values[i].users)[u]
            if user.op == "output" or "empty" in values[j].name:
                continue
            user.replace_input_with(values[i], values[j])
            finish(edited)
            checked += 1
            # Of an edited graph that is left alone nothing is compared: it may read memory that nobody wrote.
            if any(isinstance(one, MoEMatch) for one in edited.find()):
                check_rewrite(edited, tolerance=1.2e-2)
    assert checked > 10


def test_near_misses_are_one_a_block_and_in_order() -> None:
    modules = torch.nn.ModuleList(
        [Experts(Spelling("batched_mm", gate=name), dtype=torch.float32) for name in ("silu", "swiglu_oai", "gelu")]
    )

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = modules

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, ids, weights)
            return x

    captured = capture(Layers(), list(random_inputs(modules[0])))  # type: ignore[arg-type]
    (tanh,) = captured.nodes(aten.clamp)[:1]
    insert_after(captured, tanh, aten.mul.Tensor, 1.01)
    (gelu,) = captured.nodes(aten.gelu)
    insert_after(captured, gelu, aten.mul.Tensor, 1.01)
    found = check_rewrite(captured)
    assert [type(one) for one in found] == [MoEMatch, NearMiss, NearMiss]
    _, again = rewrite_all(captured)
    assert [getattr(one, "reason", "") for one in again] == [getattr(one, "reason", "") for one in found]
