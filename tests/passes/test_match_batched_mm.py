"""Batched GEMMs: weights gathered for each slot, in bmm or in the multiply-and-sum that Inductor makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_capture import check_rewrite, only_match
from hooked_experts import Hook, capture_hooked, check_miss
from torch import Tensor

E = 4


def multiply_and_sum(weight_name: str, x_name: str, weight_first: bool = True) -> Hook:
    """What Inductor makes of a bmm with one row or one column under coordinate_descent_tuning."""

    def product(value: Tensor, e: dict[str, Any]) -> Any:
        weight, x = e[weight_name + "_gathered"], e[x_name]
        if weight_first:
            return (weight.unsqueeze(-1) * x.unsqueeze(-1).unsqueeze(1)).sum(dim=2)
        product = (x.unsqueeze(1).unsqueeze(-1) * weight.mT.contiguous().unsqueeze(1)).sum(dim=2)
        return product.mT

    return product


def rows_of(x: Hook) -> dict[str, Hook]:
    return {"x": x}


HITS: dict[str, dict[str, Hook]] = {
    "expanded, three dimensions": rows_of(
        lambda v, e: e["hidden_states"].unsqueeze(1).expand(-1, 2, -1).reshape(-1, 32, 1)
    ),
    "rows cast to the weights' dtype": rows_of(lambda v, e: v.double().float()),
    "weights upcast after the gather": {
        "up_weight_gathered": lambda v, e: v.double().float(),
        "down_weight_gathered": lambda v, e: v.double().float(),
    },
    "result as (tokens, K, H)": {
        "sum": lambda v, e: (e["out"].view(6, 2, 32) * e["topk_weights"].unsqueeze(-1)).sum(1)
    },
    "multiply and sum": {
        "up_weight_product": multiply_and_sum("up_weight", "x"),
        "down_weight_product": multiply_and_sum("down_weight", "inner"),
    },
}


@pytest.mark.parametrize("name", HITS)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_found(name: str, decomposed: bool) -> None:
    dynamic = "(tokens, K, H)" not in name
    only_match(check_rewrite(capture_hooked(HITS[name], "batched_mm", decomposed=decomposed, dynamic=dynamic)))


def _as_tensor(function: Any) -> Hook:
    return lambda value, e: function(value)


MISSES: dict[str, tuple[str, dict[str, Hook]]] = {
    "clamped ids": (
        "that none is could not be shown",
        {"up_weight_ids": lambda v, e: v.clamp(0, E - 1), "down_weight_ids": lambda v, e: v.clamp(max=E - 1)},
    ),
    "clamped by clamp_min": (
        "that none is could not be shown",
        {"up_weight_ids": lambda v, e: torch.clamp_min(v, 0)},
    ),
    "different ids": (
        "the two projections use different expert ids",
        {"down_weight_ids": lambda v, e: (v + 1) % E},
    ),
    "clamped from one": (
        "the two projections use different expert ids",
        {"down_weight_ids": lambda v, e: v.clamp(min=1)},
    ),
    "clamped below the last": (
        "the two projections use different expert ids",
        {"up_weight_ids": lambda v, e: v.clamp(max=E - 2)},
    ),
    "ids of the next slot": (
        "the two projections use different expert ids",
        {"down_weight_ids": lambda v, e: v.roll(1)},
    ),
    "ids in another order than the weights": (
        "not in the same order",
        {"ids": lambda v, e: v[torch.sort(v)[1]]},
    ),
    "hidden states of the next token": (
        "not the hidden states of the slots",
        {"x": lambda v, e: v.roll(1, 0)},
    ),
    "hidden states token by token": (
        "not the hidden states of the slots",
        {"x": lambda v, e: e["hidden_states"].repeat(2, 1)},
    ),
    "hidden states in the sorted order": (
        "not the hidden states of the slots",
        {"x": lambda v, e: v[torch.sort(e["ids"])[1]]},
    ),
    "hidden states weighted": (
        "not the hidden states of the slots",
        {"x": lambda v, e: v * e["topk_weights"].reshape(-1).unsqueeze(-1)},
    ),
    "rows through integers": (
        "in an unknown shape",
        {"x": lambda v, e: v.unsqueeze(-1).to(torch.int32).float()},
    ),
    "weight scaled": ("is not a graph input", {"up_weight": lambda v, e: v * 2.0}),
    "weight merged": ("is not a graph input", {"down_weight": lambda v, e: v + e["others"][0] @ e["others"][1]}),
    "weight cast": ("is cast to torch.float32 in the graph", {"up_weight": lambda v, e: v.double().float()}),
    "weight sliced": ("is not a graph input", {"up_weight": lambda v, e: torch.cat([v[:2], v[2:]])}),
    "product in three dimensions": (
        "used in its 3-D shape",
        {"down_weight_product": lambda v, e: v * e["topk_weights"].reshape(-1, 1, 1)},
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_left_alone(name: str) -> None:
    reason, hooks = MISSES[name]
    others = [torch.randn(E, 32, 2), torch.randn(E, 2, 16)] if name == "weight merged" else []
    check_miss(reason, capture_hooked(hooks, "batched_mm", others=others))


def test_several_rows_a_slot_are_left_alone() -> None:
    """A batched product with gathered matrices that is no expert projection, such as a low-rank adapter by id."""

    def hook(value: Tensor, e: dict[str, Any]) -> Tensor:
        low = torch.bmm(e["others"][0][e["ids"]], e["others"][1][e["ids"]])  # (S, 32, 2) by (S, 2, 16)
        return value + low.sum(-1)[:, :16]

    others = [torch.randn(E, 32, 2), torch.randn(E, 2, 16)]
    found = check_rewrite(capture_hooked({"inner": hook}, "batched_mm", others=others))
    assert any("takes 16 rows a slot, not one" in getattr(one, "reason", "") for one in found)


def test_dynamic_weight_shape_is_left_alone() -> None:
    from graph_capture import capture

    def block(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)

    inputs = [torch.randn(4, 8, 8), torch.randint(0, 4, (6,)), torch.randn(6, 8)]
    check_miss("has a dynamic shape", capture(block, inputs, dynamic=(0,)))


def test_weights_of_four_dimensions_are_no_candidates() -> None:
    from graph_capture import capture

    def block(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(weight[ids].flatten(1, 2), x.unsqueeze(-1)).squeeze(-1)

    inputs = [torch.randn(4, 2, 4, 8), torch.randint(0, 4, (6,)), torch.randn(6, 8)]
    assert check_rewrite(capture(block, inputs)) == []


def test_expert_weight_of_another_rank_is_left_alone() -> None:
    """One table of all rows, viewed as experts in the graph."""

    def block(value: Tensor, e: dict[str, Any]) -> Any:
        return e["others"][0].view(E, 32, 32)

    check_miss(
        "is not a graph input", capture_hooked({"up_weight": block}, "batched_mm", others=[torch.randn(128, 32)])
    )


def test_broadcast_product_is_no_projection() -> None:
    """(1, N, K) by (S, K, 1): every slot takes the one matrix that was gathered."""

    def hook(value: Tensor, e: dict[str, Any]) -> Any:
        one = e["up_weight"][e["ids"][:1]]
        return (one.unsqueeze(-1) * e["x"].unsqueeze(-1).unsqueeze(1)).sum(dim=2)

    found = check_rewrite(capture_hooked({"up_weight_product": hook}, "batched_mm"))
    assert len(found) == 2  # the gather of the up weight, and the down projection without an up projection
    assert "between the two projections" in getattr(found[1], "reason", "")


def test_transposed_multiply_and_sum() -> None:
    def product(weight: str, x: str) -> Hook:
        def hook(value: Tensor, e: dict[str, Any]) -> Any:
            matrix = getattr(e["self"], weight).mT[e["ids"]]  # (S, K, N)
            return (e[x].unsqueeze(1).unsqueeze(-1) * matrix.unsqueeze(1)).sum(dim=2).squeeze(1).unsqueeze(-1)

        return hook

    hooks = {"up_weight_product": product("gate_up_proj", "x"), "down_weight_product": product("down_proj", "inner")}
    spec = only_match(check_rewrite(capture_hooked(hooks, "batched_mm"))).spec
    assert not spec.transposed


def test_one_transposed_projection_is_left_alone() -> None:
    """Square experts: the shapes do not tell."""
    hooks: dict[str, Hook] = {"down_weight": lambda v, e: v.mT}
    check_miss("one projection's weight is transposed", capture_hooked(hooks, "batched_mm", hidden=16, intermediate=16))


def test_silu_of_a_gathered_weight_is_left_alone() -> None:
    hooks: dict[str, Hook] = {"up_weight": lambda v, e: F.silu(v)}
    check_miss("it is made by aten.silu.default", capture_hooked(hooks, "batched_mm"))
