"""Which row comes from where: routing followed as an index function, whatever operators spell it.

Routing tensors are functions of their position, and a routed tensor is a base tensor read at such a function:

    perm = argsort(ids)          ->  perm[i] = Perm(i)
    x[perm // K]                 ->  row i is x[FloorDiv(Perm(i), K)]
    inverse[perm] = arange(S)    ->  inverse[i] = InversePerm(i)
    y[inverse]                   ->  row i is y[InversePerm(i)]

An expression says nothing about how many rows there are; whoever concludes from one compares the sizes as well.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    dim,
    is_copy,
    is_float,
    is_getitem,
    is_index,
    is_index_cast,
    is_reshape,
    is_zero,
    numel,
    prims,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    static,
)
from moe_compile.passes.row_expressions import (
    ROW,
    Clamp,
    Expr,
    FloorDiv,
    InversePerm,
    Load,
    Mask,
    Masked,
    Mod,
    Perm,
    Row,
    Rows,
    compose,
    floor_div,
    inverse_perm,
    perm,
)


def sort_input(sort: Node) -> Node:
    """What a sort node sorts."""
    source = source_of(sort)
    assert source is not None
    return source


class RowProvenance:
    """Index expressions of the nodes of one graph, each worked out once."""

    def __init__(self) -> None:
        self._elements: dict[Node, Expr] = {}
        self.memo: dict[Any, Any] = {}  # results of the searches over one graph, by signature

    def element(self, node: Node) -> Expr:
        """The value at flattened position ``i`` of any tensor, as an expression of ``i``. Never fails: ``Load``."""
        if node not in self._elements:
            try:
                found = self._float_element(node) if is_float(node) else self._index_element(node)
            except Unproven:  # an operand whose shape is not known
                found = None
            self._elements[node] = Load(node, ROW) if found is None else found
        return self._elements[node]

    def _moved_element(self, node: Node, source: Node) -> Expr | None:
        """Of an operator that only moves elements."""
        if is_copy(node) or is_reshape(node):
            return self.element(source)
        if calls(node, aten.expand):
            index = _expanded(shape(source), shape(node))
            return None if index is None else compose(self.element(source), index)
        gathered = self.gather_index(node)
        return None if gathered is None or rank(source) != 1 else compose(self.element(source), gathered)

    def _float_element(self, node: Node) -> Expr | None:
        source = source_of(node)
        if calls(node, aten.where.self, aten.masked_fill):
            masked = self._masked(node)
            if masked is None or not same_shape(shape(masked[0]), shape(node)):
                return None
            source, condition, mask = masked
            # One condition for each element: a condition for each row of several elements counts otherwise.
            if not same_shape(shape(condition), shape(source)):
                return None
            return Masked(mask.ids, mask.bound, self.element(source))
        return None if source is None or not is_float(source) else self._moved_element(node, source)

    def _index_element(self, node: Node) -> Expr | None:
        source = source_of(node)
        if not is_index(node):
            return None
        if calls(node, prims.iota):
            return ROW if arg(node, 1, "start", 0) == 0 and arg(node, 2, "step", 1) == 1 else None
        if calls(node, aten.arange.default):
            return ROW
        if calls(node, aten.arange.start, aten.arange.start_step):
            return ROW if arg(node, 0, "start") == 0 and arg(node, 2, "step", 1) == 1 else None
        if source is None:
            return None
        if is_getitem(node) and calls(source, aten.sort):
            return self._sorted(source, int(arg(node, 1, "index")))
        if calls(node, aten.argsort):
            return self._sorted(node, 1)
        if is_index_cast(node):
            return self.element(source)
        if not is_index(source):
            return None
        if calls(node, aten.add.Tensor) and arg(node, 1, "other") == 0:
            return self.element(source)
        if calls(node, aten.div.Tensor_mode) and node.kwargs.get("rounding_mode") in ("floor", "trunc"):
            return self._divided(source, arg(node, 1, "other"), FloorDiv)
        if calls(node, aten.floor_divide):
            return self._divided(source, arg(node, 1, "other"), FloorDiv)
        if calls(node, aten.remainder, aten.fmod):
            return self._divided(source, arg(node, 1, "other"), Mod)
        if calls(node, aten.clamp, aten.clamp_min, aten.clamp_max):
            return self._clamped(node, source)
        if calls(node, aten.index_put, aten.scatter.src):
            return self._inverted(node)
        return self._moved_element(node, source)

    def _sorted(self, sort: Node, output: int) -> Expr | None:
        source = sort_input(sort)
        *leading, last = shape(source)
        along_last = _sort_dim(sort, len(leading) + 1) == len(leading)
        if any(not same(size, 1) for size in leading) or not along_last or _descending(sort):
            return None
        inner = self.element(source)
        whole = isinstance(inner, Perm | InversePerm) and isinstance(inner.inner, Row)
        if output == 1 and whole:
            assert isinstance(inner, Perm | InversePerm)
            # argsort of a permutation is its inverse, if it is all of the permutation
            if same(last, numel(shape(sort_input(inner.sort)))):
                return inverse_perm(inner.sort, ROW) if isinstance(inner, Perm) else perm(inner.sort, ROW)
        order = perm(sort, ROW)
        return order if output == 1 else compose(inner, order)

    def _divided(self, source: Node, divisor: object, kind: type[FloorDiv] | type[Mod]) -> Expr | None:
        if not isinstance(divisor, int) or divisor < 1:
            return None
        inner = self.element(source)
        return floor_div(inner, divisor) if kind is FloorDiv else Mod(inner, divisor)

    def _clamped(self, node: Node, source: Node) -> Expr | None:
        low = arg(node, 1, "min") if calls(node, aten.clamp, aten.clamp_min) else None
        high = arg(node, 2, "max") if calls(node, aten.clamp) else None
        if calls(node, aten.clamp_max):
            high = arg(node, 1, "max")
        if not all(bound is None or isinstance(bound, int) for bound in (low, high)):
            return None
        return Clamp(low, high, self.element(source))

    def _inverted(self, node: Node) -> Expr | None:
        """``inverse[perm] = arange(n)``, as index_put or scatter; what was there before is overwritten everywhere."""
        if calls(node, aten.index_put):
            indices, values, accumulate = arg(node, 1, "indices"), arg(node, 2, "values"), arg(node, 3, "accumulate")
            index = _only(indices)
        else:
            index, values, accumulate = arg(node, 2, "index"), arg(node, 3, "src"), False
        if accumulate or not isinstance(index, Node) or not isinstance(values, Node) or not is_index(index):
            return None
        # Indices that are all different and in range are all of them, if there are as many as places.
        # (One value may have no dimension at all: PyTorch writes it so.)
        count = numel(shape(values))
        if rank(node) != 1 or not same_shape(shape(node), shape(index)) or not same(shape(node)[0], count):
            return None
        order = self.element(index)
        if not isinstance(order, Perm | InversePerm) or not isinstance(order.inner, Row):
            return None
        if self.element(values) != ROW:
            return None
        return inverse_perm(order.sort, ROW) if isinstance(order, Perm) else perm(order.sort, ROW)

    def gather_index(self, node: Node) -> Expr | None:
        """The row index of ``x[idx]`` along dimension 0, in any spelling."""
        index: Any = None
        source_rank = rank(source_of(node)) or 1
        if calls(node, aten.index.Tensor, aten._unsafe_index.Tensor):
            index = _only(arg(node, 1, "indices"))
        elif calls(node, aten.index_select.default) or (calls(node, aten.gather.default) and source_rank == 1):
            index = arg(node, 2, "index") if dim(node, 1, "dim", source_rank) == 0 else None
        return self.element(index) if isinstance(index, Node) and is_index(index) else None

    def rows(self, node: Node) -> Rows:
        """Follow the rows of a float tensor back through everything that only routes rows."""
        source = source_of(node)
        if node.op != "call_function" or source is None:
            return Rows(node)
        gathered = self.gather_index(node)
        if gathered is not None and rank(source) == 2:
            return self.rows(source).at(gathered)
        if is_copy(node):
            return self.rows(source)
        masked = self.masked_source(node)
        if masked is not None and rank(node) != 1 and same_shape(shape(masked[0]), shape(node)):
            inner = self.rows(masked[0])
            return Rows(inner.base, inner.index, (*inner.masks, masked[1]))
        index = self._row_reshape(node, source)
        if index is not None:
            inner = self.rows(source)
            if index != ROW or inner != Rows(source):
                return inner.at(index)
        return Rows(node)

    def _row_reshape(self, node: Node, source: Node) -> Expr | None:
        """A change of the leading dimensions alone."""
        if not (is_reshape(node) or calls(node, aten.expand)):
            return None
        before, after = shape(source), shape(node)
        if len(before) < 2 or len(after) < 2 or not same(before[-1], after[-1]):
            return None
        return _expanded(before[:-1], after[:-1]) if calls(node, aten.expand) else ROW

    def masked_source(self, node: Node) -> tuple[Node, Mask] | None:
        """``(x, mask)`` of ``where(ids >= E, 0, x)`` or ``masked_fill``, with one id a row: sentinel rows are zero."""
        found = self._masked(node)
        if found is None or not _one_per_row(shape(found[1]), shape(found[0])):
            return None
        return found[0], found[2]

    def _masked(self, node: Node) -> tuple[Node, Node, Mask] | None:
        """``(x, condition, mask)``, whatever the shape of the condition."""
        if calls(node, aten.masked_fill):
            source, condition, zero = arg(node, 0, "self"), arg(node, 1, "mask"), arg(node, 2, "value")
            sense = True
        elif calls(node, aten.where.self):
            condition, zero, source = arg(node, 0, "condition"), arg(node, 1, "self"), arg(node, 2, "other")
            sense = is_zero(zero)
            if not sense:
                zero, source = source, zero
        else:
            return None
        if not isinstance(source, Node) or not isinstance(condition, Node) or not is_zero(zero):
            return None
        mask = self._sentinel_mask(condition, sense)
        return None if mask is None else (source, condition, mask)

    def _sentinel_mask(self, condition: Node, sense: bool) -> Mask | None:
        """The ids and bound of ``ids >= bound``, or of its opposite if ``sense`` is False."""
        while is_copy(condition) or is_reshape(condition) or calls(condition, aten.logical_not, aten.bitwise_not):
            source = source_of(condition)
            if source is None:
                return None
            sense ^= calls(condition, aten.logical_not, aten.bitwise_not)
            condition = source
        ids, bound = source_of(condition), arg(condition, 1, "other")
        if ids is None or not is_index(ids) or not isinstance(bound, int):
            return None
        if calls(condition, aten.ge.Scalar if sense else aten.lt.Scalar):
            return Mask(self.element(ids), bound)
        if calls(condition, aten.gt.Scalar if sense else aten.le.Scalar):
            return Mask(self.element(ids), bound + 1)
        return None


def _only(indices: object) -> Any:
    """The index of ``x[index]``; None for any other number of indices, or ``x[:, index]``."""
    return indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None


def _one_per_row(condition: tuple[Any, ...], source: tuple[Any, ...]) -> bool:
    """Whether a condition has one element for each row (or, of a 1-D tensor, each element) of ``source``."""
    if len(source) == 1:
        return same_shape(condition, source)
    return len(condition) == len(source) and same_shape(condition[:-1], source[:-1]) and same(condition[-1], 1)


def _sort_dim(sort: Node, rank: int) -> int:
    if calls(sort, aten.sort.stable, aten.argsort.stable):
        found = int(sort.kwargs.get("dim", -1))  # type: ignore[arg-type]
        return found + rank if found < 0 else found
    return dim(sort, 1, "dim", rank, -1)


def _descending(sort: Node) -> bool:
    if calls(sort, aten.sort.stable, aten.argsort.stable):
        return bool(sort.kwargs.get("descending", False))
    return bool(arg(sort, 2, "descending", False))


def _expanded(before: tuple[Any, ...], after: tuple[Any, ...]) -> Expr | None:
    """Flattened position in an expanded tensor -> flattened position in its source, where that is one division."""
    if len(before) != len(after):
        before = (1,) * (len(after) - len(before)) + tuple(before)
    changed = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if not same(b, a)]
    if not changed:
        return ROW
    first, last = changed[0], changed[-1]
    if any(not same(before[d], 1) for d in range(first, last + 1)):
        return None
    inner = numel(after[last + 1 :])
    if same(inner, 1):
        repeats = static(numel(after[first : last + 1]))
        return None if repeats is None else floor_div(ROW, repeats)
    size = static(inner)
    if size is not None and all(same(b, 1) for b in before[:first]):
        return Mod(ROW, size)
    return None
