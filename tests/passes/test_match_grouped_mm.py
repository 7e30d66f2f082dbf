"""Grouped GEMMs: group offsets are followed to the ids that they count, or left alone with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import Experts, Spelling, random_inputs
from graph_capture import capture, check_rewrite, only_match, only_miss
from graph_edits import set_argument
from hooked_experts import Hook, capture_hooked, check_miss
from torch import Tensor

E = 4


def histc(ids: Tensor, bins: int = E, low: int = 0, high: int = E - 1) -> Tensor:
    return torch.histc(ids.float(), bins=bins, min=low, max=high)


HITS: dict[str, dict[str, Hook]] = {
    "counted before the sort": {"counts": lambda v, e: histc(e["ids"])},
    "counted as float64": {"counts": lambda v, e: torch.histc(e["ids"].double(), bins=E, min=0, max=E - 1)},
    "cast to int32 at the end": {"offsets": lambda v, e: torch.cumsum(e["counts"], 0).to(torch.int32)},
    "cast to int64 in between": {"counts": lambda v, e: v.long()},
    "a second sort for the mask": {
        "gate_up": lambda v, e: v.masked_fill((torch.sort(e["ids"], stable=True)[0] >= E).unsqueeze(-1), 0.0)
    },
    "where instead of masked_fill": {
        "gate_up": lambda v, e: torch.where((e["sorted_ids"] >= E).unsqueeze(-1), torch.zeros_like(v), v)
    },
    "mask of those that stay": {"out": lambda v, e: torch.where((e["sorted_ids"] < E).unsqueeze(-1), v, 0.0)},
    "mask of those up to the last": {"out": lambda v, e: torch.where((e["sorted_ids"] <= E - 1).unsqueeze(-1), v, 0.0)},
    "mask above the last": {"out": lambda v, e: v.masked_fill((e["sorted_ids"] > E - 1).unsqueeze(-1), 0.0)},
    "negated mask": {"out": lambda v, e: v.masked_fill(~(e["sorted_ids"] < E).unsqueeze(-1), 0.0)},
    "sorted as int32": {"ids": lambda v, e: v.int()},
}


@pytest.mark.parametrize("name", HITS)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_found(name: str, decomposed: bool) -> None:
    only_match(check_rewrite(capture_hooked(HITS[name], decomposed=decomposed, dynamic=True)))


MISSES: dict[str, tuple[str, dict[str, Hook]]] = {
    "more bins": ("made by aten.slice.Tensor, not by histc", {"counts": lambda v, e: histc(e["ids"], bins=5)[:E]}),
    "other range": ("count ids 0..4 in 4 bins", {"counts": lambda v, e: histc(e["ids"], high=E)}),
    "from one": ("count ids 1..3 in 4 bins", {"counts": lambda v, e: histc(e["ids"], low=1)}),
    "counts given": ("not by histc or bincount", {"counts": lambda v, e: e["others"][0]}),
    "counts scaled": ("not by histc or bincount", {"counts": lambda v, e: v * 1}),
    "offsets given": ("not by a cumulative sum of counts", {"offsets": lambda v, e: e["others"][0].int()}),
    "offsets moved": ("not by a cumulative sum of counts", {"offsets": lambda v, e: v - 1}),
    "counts in one byte": ("not by histc or bincount", {"counts": lambda v, e: v.to(torch.int8)}),
    "offsets in one byte": ("overflows", {"offsets": lambda v, e: e["counts"].cumsum(0, dtype=torch.int8).int()}),
    "cast to one byte": ("not by a cumulative sum", {"offsets": lambda v, e: v.to(torch.uint8).int()}),
    "counts in float16": (
        "which is not exact",
        {"counts": lambda v, e: torch.histc(e["ids"].half(), bins=E, min=0, max=E - 1)},
    ),
    "other ids": ("not sorted by the ids that the groups", {"counts": lambda v, e: histc(e["others"][0])}),
    "ids plus one": ("do not count every (token, k) slot once", {"counts": lambda v, e: histc((e["ids"] + 1) % E)}),
    "some of the ids": (
        "do not count every (token, k) slot once",
        {"counts": lambda v, e: histc(e["ids"][torch.arange(10)])},
    ),
    "ids of one slot": (
        "do not count every (token, k) slot once",
        {"counts": lambda v, e: histc(e["ids"][e["perm"] // 2])},
    ),
    "ids through a bool": (
        "which does not tell 4 apart",
        {"counts": lambda v, e: histc(e["ids"].bool())},
    ),
    "sorted the other way": (
        "not sorted by the ids that the groups",
        {"perm": lambda v, e: torch.sort(e["ids"], descending=True)[1]},
    ),
    "sorted by the tokens": (
        "not sorted by the ids that the groups",
        {"perm": lambda v, e: torch.sort(e["topk_weights"].reshape(-1))[1]},
    ),
    "mask with another bound": (
        "set to zero by another condition than id >= 4",
        {"out": lambda v, e: v.masked_fill((e["sorted_ids"] >= E - 1).unsqueeze(-1), 0.0)},
    ),
    "mask from above E": (
        "set to zero by another condition than id >= 4",
        {"x": lambda v, e: v.masked_fill((e["sorted_ids"] > E).unsqueeze(-1), 0.0)},
    ),
    "mask of other rows": (
        "set to zero by another condition than id >= 4",
        {"gate_up": lambda v, e: v.masked_fill((e["ids"] >= E).unsqueeze(-1), 0.0)},
    ),
    "mask of those that are there": (
        "between the down projection and the sum",
        {"out": lambda v, e: v.masked_fill((e["sorted_ids"] < E).unsqueeze(-1), 0.0)},
    ),
    "mask with another value": (
        "between the down projection and the sum",
        {"out": lambda v, e: v.masked_fill((e["sorted_ids"] >= E).unsqueeze(-1), 1.0)},
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_left_alone(name: str) -> None:
    reason, hooks = MISSES[name]
    others = {
        "counts given": torch.full((E,), 3.0),
        "offsets given": torch.tensor([3, 6, 9, 12]),
        "other ids": torch.randint(0, E, (6, 2), generator=torch.Generator().manual_seed(3)),
    }
    check_miss(reason, capture_hooked(hooks, others=[others[name]] if name in others else []))


def test_two_group_offsets() -> None:
    """The down projection's groups are those of other ids."""

    def offsets(value: Tensor, e: dict[str, Any]) -> Tensor:
        e["down_weight_offsets"] = torch.cumsum(histc(e["others"][0]), 0, dtype=torch.int32)
        return value

    other = torch.randint(0, E, (6, 2), generator=torch.Generator().manual_seed(3))
    check_miss("the two projections use different expert ids", capture_hooked({"offsets": offsets}, others=[other]))


def test_bincount() -> None:
    class Module(torch.nn.Module):
        def __init__(self, weighted: bool, check: bool) -> None:
            super().__init__()
            self.weighted, self.check = weighted, check

        def forward(self, ids: Tensor) -> Tensor:
            counts = torch.bincount(ids, ids if self.weighted else None, minlength=E)
            if self.check:
                torch._check(counts.shape[0] == E)  # type: ignore[no-untyped-call]
            return counts

    def counts(weighted: bool, check: bool) -> dict[str, Hook]:
        return {"counts": lambda v, e: Module(weighted, check)(e["ids"])}

    only_match(check_rewrite(capture_hooked(counts(False, True))))
    captured = capture_hooked(counts(False, True))
    (node,) = captured.nodes(torch.ops.aten.bincount)
    node.meta["val"] = captured.placeholders[2].meta["val"].new_empty(5, dtype=torch.int64)
    check_miss("bincount gives 5 groups, but the weight has 4 experts", captured)
    check_miss("the group sizes are weighted counts", capture_hooked(counts(True, True)))


@pytest.mark.parametrize(("dtype", "experts"), [(torch.bfloat16, 257), (torch.float16, 2049)])
def test_counting_in_a_dtype_that_does_not_tell_ids_apart(dtype: torch.dtype, experts: int) -> None:
    hooks: dict[str, Hook] = {
        "counts": lambda v, e: torch.histc(e["ids"].to(dtype).float(), bins=experts, min=0, max=experts - 1)
    }
    captured = capture_hooked(hooks, experts=experts, hidden=8, intermediate=8)
    check_miss(f"counted as {dtype}, which does not tell {experts} apart", captured)
    only_match(check_rewrite(capture_hooked({"counts": lambda v, e: histc(e["ids"].to(dtype))})))


def test_bias_argument() -> None:
    module = Experts(Spelling())
    captured = capture(module, list(random_inputs(module)))
    for node in captured.nodes(torch.ops.aten._grouped_mm):
        node.args = (*node.args, captured.placeholders[0])
    found = captured.find()
    assert "has a bias argument of its own" in getattr(found[0], "reason", "")


def test_no_offsets_and_other_ranks() -> None:
    def both(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, weight, offs=offsets)

    offsets = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    wide, square = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    captured = capture(both, [wide, square, offsets])  # 2-D by 2-D: one product a group of columns
    check_miss("is not rows times experts", captured)
    captured = capture(
        lambda x, weight: torch.nn.functional.grouped_mm(x, weight),
        [torch.randn(4, 8, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16()],
    )
    check_miss("has no group offsets", captured)


def test_set_argument_changes_the_graph() -> None:
    """The edits that other tests rely on do take effect: histc of another range computes something else."""
    captured = capture_hooked()
    (node,) = captured.nodes(torch.ops.aten.histc)
    check_miss("count ids 0..7 in 4 bins", set_argument(captured, node, 3, 7))


def test_index_sort_dimension() -> None:
    """Sorting (1, S) along its first dimension leaves it as it is."""
    hooks: dict[str, Hook] = {"perm": lambda v, e: torch.sort(e["ids"].unsqueeze(0), dim=0)[1].squeeze(0)}
    assert "the rows are not sorted by the ids" in only_miss(capture_hooked(hooks).find()).reason
