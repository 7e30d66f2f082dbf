"""Unrolled loops over all experts of stacked weights: one pair of GEMMs an expert, added up one after the other.

A term of the sum is ``MLP_e(x) * weight``, in one of two forms:

- gathered: ``token, slot = where(mask_e)``; ``x`` is ``hidden[token]``, the weight ``topk_weights[token, slot]``, and
  the term is added to the rows ``token``;
- dense: ``x`` is ``hidden``, and the weight the sum over the slots of ``where(mask_e, topk_weights, 0)``.

``mask_e`` is ``topk_ids == e``. A block has one term for each expert ``e`` of both weights, whose gate functions agree.
An id twice in one row counts twice in either form, and an id of no expert counts nowhere: as in the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.expert_masks import ExpertMask, mask_column, masked_weights, row_weight
from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    dim,
    is_copy,
    is_float_cast,
    is_reshape,
    is_zero,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    static,
    tensor,
    value_users,
)
from moe_compile.passes.gate_function import GateMatch, match_gate_function
from moe_compile.passes.row_expressions import ROW
from moe_compile.passes.row_provenance import RowProvenance

FORM = "loop"


@dataclass(frozen=True)
class LoopBlock:
    """A proven loop. ``up``, ``down`` and ``gate`` are one expert's; the other experts' differ in the expert alone.

    ``assertions`` hold for every size of ``nonzero`` and only keep the loop's indices alive.
    """

    root: Node
    hidden: Node
    ids: Node
    weights: Node
    weights_dtype: torch.dtype
    up: ExpertGemm
    down: ExpertGemm
    gate: GateMatch
    activation_dtype: torch.dtype
    interior: frozenset[Node]
    assertions: tuple[Node, ...]


@dataclass(frozen=True)
class LoopFailure:
    """A pair of stacked weights whose matrices are used one by one, in no proven block."""

    down: ExpertGemm
    known: frozenset[Node]
    problem: Unproven


@dataclass(frozen=True)
class _Term:
    """One expert's share of the sum. ``rows`` is the index of ``index_add``, None if all rows are added."""

    down: ExpertGemm
    weight: Node
    rows: Node | None
    interior: tuple[Node, ...]


@dataclass
class _Sum:
    """An accumulation of terms that all use the same down projection."""

    node: Node | None
    terms: list[_Term]
    interior: list[Node] = field(default_factory=list)


def find_loops(graph: Graph, provenance: RowProvenance) -> tuple[list[LoopBlock], list[LoopFailure]]:
    """Every loop over experts that is proven, and one failure for each down projection that is in none."""
    gemms, experts = _gemms(graph)
    if not gemms:
        return [], []
    blocks: list[LoopBlock] = []
    problems: dict[Node, Unproven] = {}
    for total in _sums(graph, gemms):
        try:
            blocks.append(_prove(total, gemms, experts, provenance))
        except Unproven as problem:
            problems.setdefault(total.terms[0].down.weight, problem)
    proven = {weight for block in blocks for weight in (block.up.weight, block.down.weight)}
    failures: list[LoopFailure] = []
    for weight, found in problems.items():
        down = next(gemm for gemm in gemms.values() if gemm.weight is weight)
        if weight not in proven and sum(gemm.weight is weight for gemm in gemms.values()) > 1:
            inputs = {gemm.weight for gemm in gemms.values() if gemm.weight not in proven}
            failures.append(LoopFailure(down, frozenset(inputs), found))
    return blocks, failures


def _gemms(graph: Graph) -> tuple[dict[Node, ExpertGemm], dict[Node, int]]:
    """The products with one expert's matrix of a stacked weight, and which expert's."""
    gemms: dict[Node, ExpertGemm] = {}
    experts: dict[Node, int] = {}
    for node in graph.nodes:
        if not calls(node, aten.mm.default):
            continue
        x, matrix = node.args
        swapped = False
        while is_copy(matrix) or _swaps(matrix):
            swapped ^= _swaps(matrix)
            matrix = source_of(matrix)
        if not calls(matrix, aten.select.int):
            continue
        weight, index = source_of(matrix), arg(matrix, 2, "index")
        if weight is None or weight.op != "placeholder" or rank(weight) != 3 or dim(matrix, 1, "dim", 3) != 0:
            continue
        count = static(shape(weight)[0])
        if count is None or not all(isinstance(s, int) for s in shape(weight)) or not isinstance(index, int):
            continue
        gemms[node] = ExpertGemm(node, x, weight, not swapped, "listed", ROW, (node,), FORM)
        experts[node] = index % count
    return gemms, experts


def _swaps(node: object) -> bool:
    if not isinstance(node, Node) or rank(node) != 2:
        return False
    if calls(node, aten.t):
        return True
    if calls(node, aten.permute):
        return [d % 2 for d in arg(node, 1, "dims")] == [1, 0]
    return calls(node, aten.transpose.int) and {dim(node, 1, "dim0", 2), dim(node, 2, "dim1", 2)} == {0, 1}


def _sums(graph: Graph, gemms: Mapping[Node, ExpertGemm]) -> list[_Sum]:
    """The largest sums of terms of one down projection, in graph order."""
    sums: dict[Node, _Sum] = {}
    inner: set[Node] = set()
    for node in graph.nodes:
        parts: list[_Sum | None]
        if calls(node, aten.index_add.default, aten.index_put.default):
            parts = [_part(arg(node, 0, "self"), gemms, sums), _added_rows(node, gemms)]
        elif calls(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
            operands = arg(node, 0, "self"), arg(node, 1, "other")
            shapes_fit = all(not isinstance(o, Node) or same_shape(shape(o), shape(node)) for o in operands)
            parts = [_part(o, gemms, sums) for o in operands] if shapes_fit else [None]
        else:
            continue
        found = [part for part in parts if part is not None]
        terms = [term for part in found for term in part.terms]
        if len(found) < len(parts) or len({term.down.weight for term in terms}) != 1:
            continue
        interior = [one for part in found for one in part.interior]
        inner |= {part.node for part in found if part.node is not None}
        sums[node] = _Sum(node, terms, [*interior, node])
    return [total for node, total in sums.items() if node not in inner]


def _part(operand: object, gemms: Mapping[Node, ExpertGemm], sums: Mapping[Node, _Sum]) -> _Sum | None:
    """An operand of a sum: zero, an earlier sum, or a term that is added to all rows."""
    if isinstance(operand, Node) and operand in sums:
        return sums[operand]
    if is_zero(operand):
        return _Sum(None, [])
    term = _term(operand, gemms, None)
    return None if term is None else _Sum(None, [term])


def _added_rows(node: Node, gemms: Mapping[Node, ExpertGemm]) -> _Sum | None:
    """``self[rows] += term`` along dimension 0."""
    if calls(node, aten.index_add.default):
        rows, source = arg(node, 2, "index"), arg(node, 3, "source")
        if dim(node, 1, "dim", rank(node) or 1) != 0 or arg(node, 4, "alpha", 1) != 1:
            return None
    else:
        indices, source = arg(node, 1, "indices"), arg(node, 2, "values")
        if len(indices) != 1 or not arg(node, 3, "accumulate", False):
            return None
        (rows,) = indices
    term = _term(source, gemms, rows) if isinstance(rows, Node) else None
    return None if term is None else _Sum(None, [term])


def _term(node: object, gemms: Mapping[Node, ExpertGemm], rows: Node | None) -> _Term | None:
    """``down * weight``; the product is the only thing between the projection and the sum, besides casts."""
    interior: list[Node] = []
    node = _through_casts(node, interior)
    if not isinstance(node, Node) or not calls(node, aten.mul.Tensor):
        return None
    interior.append(node)
    for value, weight in (node.args, node.args[::-1]):
        casts: list[Node] = []
        start = _through_casts(value, casts)
        if isinstance(start, Node) and start in gemms and isinstance(weight, Node):
            return _Term(gemms[start], weight, rows, (*interior, *casts, start))
    return None


def _through_casts(node: object, passed: list[Node]) -> object:
    while isinstance(node, Node) and (is_float_cast(node) or is_copy(node)):
        passed.append(node)
        node = source_of(node)
    return node


def _prove(
    total: _Sum, gemms: dict[Node, ExpertGemm], experts: dict[Node, int], provenance: RowProvenance
) -> LoopBlock:
    first, root = total.terms[0].down, total.node
    assert root is not None
    seen: dict[int, Node] = {}
    common: set[tuple[object, ...]] = set()
    interior: list[Node] = list(total.interior)
    nonzeros: list[Node] = []
    for term in total.terms:
        down = term.down
        gate = match_gate_function(down.x, gemms, provenance)
        up, expert = gate.linear, experts[down.node]
        if gate.bias is not None or gate.masks:
            raise Unproven("a bias or a mask by expert id inside a loop over experts", down.node)
        if experts[up.node] != expert:
            raise Unproven(
                f"the up projection is expert {experts[up.node]}'s, the down projection expert {expert}'s", down.node
            )
        if expert in seen:
            raise Unproven(f"expert {expert} is in the sum more than once", down.node)
        seen[expert] = down.node
        hidden, mask, weights, dtype, nonzero = _routing(term, up)
        if mask.expert != expert:
            raise Unproven(f"expert {expert} computes the tokens of id {mask.expert}", down.node)
        common.add((
            up.weight, up.transposed, gate.gate, gate.gate_up_layout, gate.up_first,
            down.transposed, hidden, mask.ids, weights, dtype, tensor(up.x).dtype,
        ))  # fmt: skip
        interior += [*term.interior, *gate.interior, up.node]
        nonzeros += [] if nonzero is None else [nonzero]
    if len(common) > 1:
        raise Unproven(
            "the experts of the loop differ in more than their weights: gate function, weight tensor, hidden states, "
            "ids or routing weights",
            first.node,
        )
    missing = sorted(set(range(first.num_experts)) - set(seen))
    if missing:
        raise Unproven(f"the loop leaves out the experts {missing} of {first.num_experts}", first.node)
    if gate.linear.num_experts != first.num_experts:
        raise Unproven(f"the projections have {gate.linear.num_experts} and {first.num_experts} experts", first.node)
    if not same_shape(shape(root), shape(hidden)) or rank(hidden) != 2:
        raise Unproven(f"the sum has shape {tuple(shape(root))}, the hidden states {tuple(shape(hidden))}", root)
    if not same(shape(mask.ids)[0], shape(hidden)[0]) or not same_shape(shape(mask.ids), shape(weights)):
        raise Unproven("ids and routing weights are not one row for each token", root)
    return LoopBlock(
        root=root,
        hidden=hidden,
        ids=mask.ids,
        weights=weights,
        weights_dtype=dtype,
        up=gate.linear,
        down=term.down,
        gate=gate,
        activation_dtype=tensor(gate.linear.x).dtype,
        interior=frozenset(interior),
        assertions=tuple(one for nonzero in nonzeros for one in _size_assertions(nonzero)),
    )


def _routing(term: _Term, up: ExpertGemm) -> tuple[Node, ExpertMask, Node, torch.dtype, Node | None]:
    """``(hidden, mask, weights, weights' dtype, nonzero)`` of one term."""
    if term.rows is None:
        mask, weights, dtype = masked_weights(term.weight)
        hidden = up.x
        while is_copy(hidden) and (copied := source_of(hidden)) is not None:
            hidden = copied
        return hidden, mask, weights, dtype, None
    token = mask_column(term.rows)
    if token is None or token.axis != 0:
        raise Unproven("the rows that an expert adds to are not the tokens that its mask selects", term.rows)
    hidden, index = _gathered_rows(up.x)
    if mask_column(index) != token:
        raise Unproven("an expert's hidden states are not those of the tokens that it adds to", up.x)
    weights, dtype = row_weight(term.weight, token)
    return hidden, token.mask, weights, dtype, token.nonzero


def _gathered_rows(x: Node) -> tuple[Node, Node]:
    """``(hidden, index)`` of ``hidden[index]`` or ``hidden[None, index].reshape(-1, H)``."""
    gathered: Node | None = x
    while is_copy(gathered) or (
        is_reshape(gathered) and gathered is not None and same(shape(gathered)[-1], shape(source_of(gathered))[-1])
    ):
        assert gathered is not None
        gathered = source_of(gathered)
    if gathered is not None and calls(gathered, aten.index.Tensor, aten.index_select.default):
        source = source_of(gathered)
        by_index = calls(gathered, aten.index.Tensor)
        indices = arg(gathered, 1, "indices") if by_index else [None] * dim(gathered, 1, "dim", rank(source) or 1)
        indices = list(indices) if by_index else [*indices, arg(gathered, 2, "index")]
        if indices[:-1] == [None] and rank(source) == 3 and same(shape(source)[0], 1) and calls(source, aten.unsqueeze):
            source, indices = source_of(source), indices[1:]  # type: ignore[arg-type]
        if source is not None and rank(source) == 2 and len(indices) == 1 and isinstance(indices[0], Node):
            return source, indices[0]
    raise Unproven("an expert's input is not a choice of rows of the hidden states", x)


def _size_assertions(nonzero: Node) -> list[Node]:
    """Assertions that a count of non-zeros is >= 0 and <= the number of elements: they hold without being checked."""
    elements = static(tensor(source_of(nonzero)).numel())
    found: list[Node] = []
    for size in nonzero.users:
        if not calls(size, aten.sym_size.int):
            continue
        for check in size.users:
            if check.op != "call_function" or check.target not in (operator.ge, operator.le):
                continue
            left, bound = check.args
            if left is not size or not isinstance(bound, int):
                continue
            holds = bound <= 0 if check.target is operator.ge else elements is not None and bound >= elements
            if holds:
                found += [user for user in value_users(check) if calls(user, aten._assert_scalar.default)]
    return found
