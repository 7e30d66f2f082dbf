"""From the down projection to the sum: what is followed, and a reason for everything that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_capture import check_rewrite, only_match
from hooked_experts import Hook, capture_hooked, check_miss
from torch import Tensor


def add_up(out: Tensor, e: dict[str, Any], token: Tensor, **options: Any) -> Tensor:
    total = torch.zeros(len(e["hidden_states"]), out.shape[1])
    return total.index_add(0, token, out, **options)


MISSES: dict[str, tuple[str, dict[str, Hook]]] = {
    "never weighted": ("no routing weights between", {"weighted": lambda v, e: e["out"]}),
    "weighted twice": ("the rows are weighted twice", {"weighted": lambda v, e: v * e["weights"].unsqueeze(-1)}),
    "weights by column": (
        "which is not one routing weight a row",
        {"weighted": lambda v, e: e["out"] * e["hidden_states"][0]},
    ),
    "scaled": ("multiplied by something that is not a routing weight", {"weighted": lambda v, e: v * 2.0}),
    "squared": ("multiplied by something that is not a routing weight", {"out": lambda v, e: v * v}),
    "integer weights": (
        "the routing weights are torch.int64, not floating",
        {"weighted": lambda v, e: e["out"] * e["perm"].unsqueeze(-1)},
    ),
    "bias after weighting": (
        "a bias is added after the routing weights",
        {"weighted": lambda v, e: v + e["self"].down_proj_bias[e["sorted_ids"]]},
    ),
    "norm of the result": ("is used elsewhere", {"out": lambda v, e: v * v.pow(2).mean(-1, keepdim=True).rsqrt()}),
    "dropout": (
        "between the down projection and the sum",
        {"out": lambda v, e: torch.nn.functional.dropout(v, 0.5)},
    ),
    "residual": (
        "aten.add.Tensor between the down projection",
        {"unsorted": lambda v, e: v + e["hidden_states"].repeat_interleave(2, 0)},
    ),
    "wrong inverse": ("are not summed into the tokens", {"inverse": lambda v, e: e["perm"]}),
    "no inverse": ("are not summed into the tokens", {"unsorted": lambda v, e: e["weighted"]}),
    "sum over tokens": (
        "aten.sum.dim_IntList between the down projection",
        {"sum": lambda v, e: e["unsorted"].view(2, 6, -1).sum(0)},
    ),
    "sum over columns": (
        "aten.sum.dim_IntList between the down projection",
        {"sum": lambda v, e: e["slots"].sum(-1)},
    ),
    "other K": (
        "not the hidden states of the slots that are summed",
        {"sum": lambda v, e: e["unsorted"].view(4, 3, -1).sum(1)},
    ),
    "mean": ("aten.mean.dim between", {"sum": lambda v, e: e["slots"].mean(1)}),
    "maximum": ("aten.amax.default between", {"sum": lambda v, e: e["slots"].amax(1)}),
    "sum of pairs of columns": (
        "on the down projection's result as",
        {"sum": lambda v, e: e["unsorted"].view(12, 2, -1).sum(1)},
    ),
    "added to the residual": (
        "added to something that is not zero",
        {"sum": lambda v, e: e["hidden_states"].index_add(0, e["perm"] // 2, e["weighted"])},
    ),
    "added twice over": (
        "aten.index_add.default between",
        {"sum": lambda v, e: add_up(e["weighted"], e, e["perm"] // 2, alpha=2.0)},
    ),
    "added to other tokens": (
        "are not summed into the tokens",
        {"sum": lambda v, e: add_up(e["weighted"], e, torch.arange(12) // 2)},
    ),
    "added to tokens read from the ids": (
        "are not summed into the tokens",
        {"sum": lambda v, e: add_up(e["weighted"], e, e["sorted_ids"])},
    ),
    "some columns scattered": (
        "aten.scatter_add.default between",
        {
            "sum": lambda v, e: torch.zeros_like(e["hidden_states"]).scatter_add(
                0, (e["perm"] // 2).unsqueeze(-1).expand(-1, 16), e["weighted"]
            )
        },
    ),
    "written and not added": (
        "aten.index_put.default between",
        {"sum": lambda v, e: torch.zeros_like(e["hidden_states"]).index_put((e["perm"] // 2,), e["weighted"])},
    ),
    "some rows left out": (
        "not every slot's row is summed",
        {"sum": lambda v, e: add_up(e["unsorted"][torch.arange(10)], e, torch.arange(10) // 2)},
    ),
    "weights at the tokens": (
        "the rows are not sorted by the ids",
        {"weights": lambda v, e: e["topk_weights"].reshape(-1)[e["perm"] // 2]},
    ),
    "weights of one token for all": (
        "",
        {"weights": lambda v, e: e["topk_weights"][:1].expand(6, 2).reshape(-1)[e["perm"]]},
    ),
    "weights not sorted": (
        "the rows are not sorted by the ids",
        {"weights": lambda v, e: e["topk_weights"].reshape(-1)},
    ),
    "weights sorted by themselves": (
        "the rows are not sorted by the ids",
        {"weights": lambda v, e: torch.sort(e["topk_weights"].reshape(-1))[0]},
    ),
}


@pytest.mark.parametrize("name", MISSES)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_left_alone(name: str, decomposed: bool) -> None:
    reason, hooks = MISSES[name]
    bias = name == "bias after weighting"
    if name in ("dropout", "mean", "norm of the result", "maximum", "added twice over") and decomposed:
        reason = ""  # the operators have other names there
    check_miss(reason, capture_hooked(hooks, bias=bias, decomposed=decomposed, dynamic=name not in NEED_STATIC))


NEED_STATIC = {"sum over tokens", "other K", "some rows left out", "added to other tokens", "sum of pairs of columns"}


def test_intermediate_value_returned() -> None:
    check_miss("is an output of the graph", capture_hooked({"sum": lambda v, e: (v, e["weighted"])}))


def test_intermediate_value_used_elsewhere() -> None:
    check_miss("is used elsewhere (by", capture_hooked({"sum": lambda v, e: (v, e["weighted"].relu())}))


def test_dynamic_number_of_experts_a_token() -> None:
    def by_rows(value: Tensor, e: dict[str, Any]) -> Tensor:
        # (2, 6, H): the second size is the symbolic one
        weighted: Tensor = e["out"] * e["weights"].unsqueeze(-1)
        return weighted.view(2, -1, 32).sum(1)

    captured = capture_hooked({"sum": by_rows}, "batched_mm", dynamic=True)
    check_miss("the number of experts a token is not static", captured)


def test_bmm_as_the_weighted_sum() -> None:
    def weighted_sum(value: Tensor, e: dict[str, Any]) -> Tensor:
        rows = e["out"][e["inverse"]].view(6, 2, -1)
        return torch.bmm(e["topk_weights"].unsqueeze(1), rows).squeeze(1)

    only_match(check_rewrite(capture_hooked({"sum": weighted_sum})))


def test_bmm_with_weights_in_another_order_is_left_alone() -> None:
    def weighted_sum(value: Tensor, e: dict[str, Any]) -> Tensor:
        rows = e["out"].view(6, 2, -1)  # still sorted by expert
        return torch.bmm(e["topk_weights"].unsqueeze(1), rows).squeeze(1)

    check_miss("the rows are not sorted by the ids", capture_hooked({"sum": weighted_sum}))


def test_bmm_of_rows_weighted_before_is_left_alone() -> None:
    def weighted_sum(value: Tensor, e: dict[str, Any]) -> Tensor:
        return torch.bmm(e["topk_weights"].unsqueeze(1), e["slots"]).squeeze(1)

    check_miss("the rows are weighted twice", capture_hooked({"sum": weighted_sum}))


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_top_1_without_a_sum(form: str) -> None:
    rows = "unsorted" if form == "grouped_mm" else "weighted"
    hooks: dict[str, Hook] = {"sum": lambda v, e: e[rows] + e["hidden_states"]}
    found = check_rewrite(capture_hooked(hooks, form, top_k=1, dynamic=True))
    assert only_match(found).spec.top_k == 1


def test_top_2_without_a_sum_is_left_alone() -> None:
    hooks: dict[str, Hook] = {"sum": lambda v, e: e["unsorted"] + 1.0}
    check_miss("aten.add.Tensor between the down projection", capture_hooked(hooks))


def test_cast_between_weighting_and_sum() -> None:
    hooks: dict[str, Hook] = {"sum": lambda v, e: e["slots"].double().sum(1).float()}
    assert only_match(check_rewrite(capture_hooked(hooks))).spec.out_dtype == torch.float32


def test_cast_of_the_sum_stays_where_the_sum_is_used_as_well() -> None:
    hooks: dict[str, Hook] = {"sum": lambda v, e: (v, v.bfloat16())}
    assert only_match(check_rewrite(capture_hooked(hooks))).spec.out_dtype == torch.float32
