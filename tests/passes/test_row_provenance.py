"""Routing as index functions: what each operator means, and which similar ones mean something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_capture import Captured, capture
from torch import Tensor
from torch.fx import Node

from moe_compile.passes.row_expressions import (
    ROW,
    Clamp,
    FloorDiv,
    InversePerm,
    Load,
    Masked,
    Mod,
    Perm,
    compose,
    inverse_perm,
    is_injective,
    perm,
)
from moe_compile.passes.row_provenance import RowProvenance

aten = torch.ops.aten
IDS = torch.tensor([3, 0, 2, 0, 1, 2])


def returned(captured: Captured) -> Node:
    (output,) = (node for node in captured.graph.nodes if node.op == "output")
    found: Any = output.args[0]
    first: Node = found[0] if isinstance(found, list | tuple) else found
    return first


def traced(function: Callable[[Tensor], Tensor], value: Tensor = IDS, dynamic: bool = False) -> tuple[Node, Node]:
    """The input and the result of ``function`` as nodes."""
    captured = capture(function, [value], dynamic=(0,) if dynamic else ())
    return captured.placeholders[0], returned(captured)


def element(function: Callable[[Tensor], Tensor], value: Tensor = IDS, dynamic: bool = False):  # type: ignore[no-untyped-def]
    return RowProvenance().element(traced(function, value, dynamic)[1])


def is_unknown(function: Callable[[Tensor], Tensor], value: Tensor = IDS) -> bool:
    """Whether the result is not followed at all."""
    _, node = traced(function, value)
    return RowProvenance().element(node) == Load(node, ROW)


def test_rules_of_permutations() -> None:
    _, sort = traced(lambda ids: torch.argsort(ids))
    assert perm(sort, InversePerm(sort, ROW)) == ROW
    assert inverse_perm(sort, Perm(sort, ROW)) == ROW
    assert compose(FloorDiv(Perm(sort, ROW), 2), InversePerm(sort, ROW)) == FloorDiv(ROW, 2)
    assert compose(Mod(ROW, 3), FloorDiv(ROW, 2)) == Mod(FloorDiv(ROW, 2), 3)
    assert is_injective(Perm(sort, InversePerm(sort, ROW)))
    assert not is_injective(FloorDiv(ROW, 2))


def test_expressions_of_the_usual_operators() -> None:
    assert element(lambda ids: torch.arange(6)) == ROW
    assert element(lambda ids: torch.arange(6) // 2) == FloorDiv(ROW, 2)
    assert element(lambda ids: torch.div(torch.arange(6), 2, rounding_mode="floor")) == FloorDiv(ROW, 2)
    assert element(lambda ids: torch.arange(6) % 3) == Mod(ROW, 3)
    assert element(lambda ids: torch.arange(3).repeat_interleave(2)) == FloorDiv(ROW, 2)
    assert element(lambda ids: torch.arange(3).unsqueeze(0).expand(2, 3).reshape(-1)) == Mod(ROW, 3)
    assert element(lambda ids: torch.arange(6).clamp(1, 4)) == Clamp(1, 4, ROW)


@pytest.mark.parametrize("stable", [False, True])
def test_both_outputs_of_sort(stable: bool) -> None:
    ids, node = traced(lambda ids: torch.sort(ids, stable=stable)[1])
    (sort,) = node.all_input_nodes
    provenance = RowProvenance()
    assert provenance.element(node) == Perm(sort, ROW)
    ids, node = traced(lambda ids: torch.sort(ids, stable=stable)[0])
    (sort,) = node.all_input_nodes
    assert provenance.element(node) == Load(ids, Perm(sort, ROW))


INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "argsort": lambda p: torch.argsort(p),
    "argsort_stable": lambda p: torch.argsort(p, stable=True),
    "index_put": lambda p: torch.empty_like(p).index_put((p,), torch.arange(6)),
    "scatter": lambda p: torch.empty_like(p).scatter(0, p, torch.arange(6)),
}


@pytest.mark.parametrize("inverse", INVERSES.values(), ids=INVERSES.keys())
def test_inverses_of_a_permutation(inverse: Callable[[Tensor], Tensor]) -> None:
    found = element(lambda ids: inverse(torch.argsort(ids)))
    assert isinstance(found, InversePerm)
    assert found.inner == ROW
    assert isinstance(element(lambda ids: inverse(inverse(torch.argsort(ids)))), Perm)


SIMILAR: dict[str, Callable[[Tensor], Tensor]] = {
    "descending": lambda ids: torch.sort(ids, descending=True)[1],
    "descending, stable": lambda ids: torch.sort(ids, descending=True, stable=True)[1],
    "argsort, descending": lambda ids: torch.argsort(ids, descending=True),
    "several rows": lambda ids: torch.sort(ids.view(2, 3))[1],
    "a dimension of one": lambda ids: torch.sort(ids.unsqueeze(0), dim=0)[1],
    "a dimension of one, stable": lambda ids: torch.sort(ids.unsqueeze(0), dim=0, stable=True)[1],
    "argsort along a dimension of one": lambda ids: torch.argsort(ids.unsqueeze(0), dim=0),
    "arange from one": lambda ids: torch.arange(1, 7),
    "arange with a step": lambda ids: torch.arange(0, 12, 2),
    "arange backwards": lambda ids: torch.arange(6, 0, -1),
    "narrow integers": lambda ids: torch.arange(6).to(torch.int8).long(),
    "booleans": lambda ids: torch.arange(6).bool().long(),
    "through floats": lambda ids: torch.arange(6).to(torch.bfloat16).long(),
    "other bits": lambda ids: ids.view(torch.int32),
    "division by a negative": lambda ids: torch.arange(6) // -2,
    "division by a tensor": lambda ids: torch.arange(6) // ids.clamp(min=1),
    "division of floats": lambda ids: (torch.arange(6.0) // 2).long(),
    "rounding up": lambda ids: -(-torch.arange(6) // 2),
    "clamp by a tensor": lambda ids: ids.clamp(max=ids[0]),
    "sum of two": lambda ids: ids + ids,
    "alpha": lambda ids: torch.add(ids, ids, alpha=0),
    "accumulated inverse": lambda ids: torch.zeros_like(ids).index_put((torch.argsort(ids),), torch.arange(6), True),
    "longer target": lambda ids: torch.zeros(7).long().index_put((torch.argsort(ids),), torch.arange(6)),
    "inverse of no permutation": lambda ids: torch.zeros_like(ids).index_put((ids,), torch.arange(6)),
    "inverse of other values": lambda ids: torch.zeros_like(ids).index_put((torch.argsort(ids),), ids),
    "scatter of a value": lambda ids: torch.zeros_like(ids).scatter(0, torch.argsort(ids), 1),
    "scatter, added": lambda ids: aten.scatter.reduce(
        torch.zeros_like(ids), 0, torch.argsort(ids), torch.arange(6), reduce="add"
    ),
    "two indices": lambda ids: ids.view(2, 3)[torch.tensor([0, 1]), torch.tensor([2, 0])],
    "second dimension": lambda ids: ids.view(2, 3)[:, torch.tensor([2, 0])],
    "a mask as index": lambda ids: aten.index.Tensor(ids, [torch.arange(6) % 2 == 0]),
    "flipped": lambda ids: ids.flip(0),
    "transposed": lambda ids: ids.view(2, 3).t().reshape(-1),
    "repeated": lambda ids: ids.repeat(2),
    "expanded in the middle": lambda ids: ids.view(2, 1, 3).expand(2, 4, 3).clone(),
}


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_ones_are_not_followed(name: str) -> None:
    node = traced(SIMILAR[name])[1]
    while node.target in (aten.squeeze.default, aten.clone.default, aten.detach.default, aten._unsafe_view.default):
        node = node.all_input_nodes[0]
    assert RowProvenance().element(node) == Load(node, ROW)


def test_argsort_of_a_part_of_a_permutation_is_not_its_inverse() -> None:
    found = element(lambda ids: torch.argsort(torch.argsort(ids)[torch.arange(3)]))
    assert isinstance(found, Perm)


def test_clamp_with_a_float_bound_is_not_followed() -> None:
    assert is_unknown(lambda ids: aten.clamp.default(ids, 0.5, None))


def test_uint8_index_is_a_mask() -> None:
    captured = capture(lambda x, i: x[i.long()], [torch.randn(6, 8), IDS.to(torch.uint8)])
    provenance = RowProvenance()
    node = returned(captured)
    indices: Any = node.args[1]
    cast: Node = indices[0]
    assert provenance.gather_index(node) == Load(cast, ROW)
    node.args = (node.args[0], [captured.placeholders[1]])
    assert provenance.gather_index(node) is None


def rows_of(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Captured, object]:
    captured = capture(function, [torch.randn(6, 8), IDS])
    return captured, RowProvenance().rows(returned(captured))


def test_rows_through_routing() -> None:
    captured, found = rows_of(lambda x, ids: x[torch.argsort(ids) // 2].clone().unsqueeze(1))
    (sort,) = captured.nodes(aten.sort) or captured.nodes(aten.argsort)
    assert (found.base, found.index) == (captured.placeholders[0], FloorDiv(Perm(sort, ROW), 2))  # type: ignore[attr-defined]
    captured, found = rows_of(lambda x, ids: x.unsqueeze(1).expand(6, 2, 8).reshape(-1, 8))
    assert found.index == FloorDiv(ROW, 2)  # type: ignore[attr-defined]
    assert found.base.all_input_nodes == captured.placeholders[:1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: x.t(),
        lambda x, ids: x.view(12, 4),
        lambda x, ids: x[:, torch.argsort(ids)],
        lambda x, ids: x.index_select(1, torch.argsort(ids)),
        lambda x, ids: x.gather(0, torch.argsort(ids).unsqueeze(1).expand(6, 8)),
        lambda x, ids: torch.where((ids >= 4).unsqueeze(-1), 1.0, x),
        lambda x, ids: torch.where((ids >= 4).unsqueeze(-1), 0.0, x[:1]),
        lambda x, ids: x.masked_fill(torch.arange(8) >= 4, 0.0),
    ],
    ids=[
        "transposed",
        "other width",
        "columns",
        "columns selected",
        "gathered by element",
        "ones",
        "one row",
        "columns masked",
    ],
)
def test_rows_are_not_followed_through_anything_else(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    captured, found = rows_of(function)
    assert found.base is returned(captured)  # type: ignore[attr-defined]


def test_masks_of_rows_and_of_elements() -> None:
    weights = torch.rand(6)

    def by_element(w: Tensor, ids: Tensor) -> Tensor:
        return w.masked_fill(ids >= 4, 0.0)

    captured = capture(by_element, [weights, IDS])
    found = RowProvenance().element(returned(captured))
    assert found == Masked(Load(captured.placeholders[1], ROW), 4, Load(captured.placeholders[0], ROW))
    # One condition for a row of three is not one for each element.
    captured = capture(lambda w, ids: w.masked_fill((ids >= 4)[:2].unsqueeze(-1), 0.0), [weights.view(2, 3), IDS])
    node = returned(captured)
    assert RowProvenance().element(node) == Load(node, ROW)
