"""Which row comes from where: routing followed as an index function, whatever operators spell it.

An index expression is a function from a row number ``i`` to an integer. Routing tensors are such functions of their
position, and a routed tensor is a base tensor read at such a function:

    perm = argsort(ids)          ->  perm[i] = Perm(i)
    x[perm // K]                 ->  row i is x[FloorDiv(Perm(i), K)]
    inverse[perm] = arange(S)    ->  inverse[i] = InversePerm(i)
    y[inverse]                   ->  row i is y[InversePerm(i)]

Two rules turn equality of routings into equality of expressions: ``Perm(InversePerm(e)) = e`` and
``InversePerm(Perm(e)) = e``. Leading dimensions are flattened in row-major order throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moe_compile.passes.fx_utils import (
    arg,
    aten,
    calls,
    is_cast,
    is_copy,
    is_float,
    is_reshape,
    numel,
    prims,
    same,
    same_shape,
    shape,
    static,
    tensor,
)


class Expr:
    """A function from a row number to an integer; subclasses are frozen, so equal functions compare equal."""


@dataclass(frozen=True)
class Row(Expr):
    """``i``, the row number itself."""


@dataclass(frozen=True)
class FloorDiv(Expr):
    inner: Expr
    divisor: int


@dataclass(frozen=True)
class Mod(Expr):
    inner: Expr
    divisor: int


@dataclass(frozen=True)
class Perm(Expr):
    """``indices[inner]`` of one ``sort`` or ``argsort`` node: a permutation."""

    sort: Node
    inner: Expr


@dataclass(frozen=True)
class InversePerm(Expr):
    sort: Node
    inner: Expr


@dataclass(frozen=True)
class Load(Expr):
    """``base.flatten()[inner]``: a value read from a tensor whose own making is not followed."""

    base: Node
    inner: Expr


@dataclass(frozen=True)
class Clamp(Expr):
    low: int | None
    high: int | None
    inner: Expr


@dataclass(frozen=True)
class Masked(Expr):
    """``0 where ids >= bound, else inner``: expert-parallel sentinel slots."""

    ids: Expr
    bound: int
    inner: Expr


ROW = Row()


def floor_div(inner: Expr, divisor: int) -> Expr:
    return inner if divisor == 1 else FloorDiv(inner, divisor)


def perm(sort: Node, inner: Expr) -> Expr:
    return inner.inner if isinstance(inner, InversePerm) and inner.sort is sort else Perm(sort, inner)


def inverse_perm(sort: Node, inner: Expr) -> Expr:
    return inner.inner if isinstance(inner, Perm) and inner.sort is sort else InversePerm(sort, inner)


def compose(outer: Expr, inner: Expr) -> Expr:
    """``i -> outer(inner(i))``."""
    if isinstance(outer, Row):
        return inner
    if isinstance(outer, FloorDiv):
        return floor_div(compose(outer.inner, inner), outer.divisor)
    if isinstance(outer, Mod):
        return Mod(compose(outer.inner, inner), outer.divisor)
    if isinstance(outer, Perm):
        return perm(outer.sort, compose(outer.inner, inner))
    if isinstance(outer, InversePerm):
        return inverse_perm(outer.sort, compose(outer.inner, inner))
    if isinstance(outer, Load):
        return Load(outer.base, compose(outer.inner, inner))
    if isinstance(outer, Masked):
        return Masked(compose(outer.ids, inner), outer.bound, compose(outer.inner, inner))
    assert isinstance(outer, Clamp)
    return Clamp(outer.low, outer.high, compose(outer.inner, inner))


def without_clamp(ids: Expr, num_experts: int) -> Expr:
    """Expert ids without clamps into [0, E), which change sentinel ids alone (and their slots count as zero)."""
    while isinstance(ids, Clamp) and ids.low in (None, 0) and ids.high in (None, num_experts - 1):
        ids = ids.inner
    return ids


def is_bijection(expr: Expr) -> bool:
    """Whether the expression visits every row exactly once."""
    while isinstance(expr, Perm | InversePerm):
        expr = expr.inner
    return isinstance(expr, Row)


@dataclass(frozen=True)
class Mask:
    """Rows with ``ids(i) >= bound`` are set to zero."""

    ids: Expr
    bound: int

    def at(self, index: Expr) -> Mask:
        return Mask(compose(self.ids, index), self.bound)


@dataclass(frozen=True)
class Rows:
    """Row ``i`` of a tensor (all but its last dimension flattened) is row ``index(i)`` of ``base``, or zero by a mask."""

    base: Node
    index: Expr = ROW
    masks: tuple[Mask, ...] = ()

    def at(self, index: Expr) -> Rows:
        """The tensor whose row ``i`` is row ``index(i)`` of this one."""
        return Rows(self.base, compose(self.index, index), tuple(mask.at(index) for mask in self.masks))


def sort_input(sort: Node) -> Node:
    """What a sort node sorts."""
    source = sort.args[0]
    assert isinstance(source, Node)
    return source


class RowProvenance:
    """Index expressions of the nodes of one graph, each worked out once."""

    def __init__(self) -> None:
        self._elements: dict[Node, Expr] = {}
        self.memo: dict[Any, Any] = {}  # results of the searches over one graph, by signature

    def element(self, node: Node) -> Expr:
        """The value at flattened position ``i`` of any tensor, as an expression of ``i``. Never fails: ``Load``."""
        if node not in self._elements:
            self._elements[node] = self._element(node) or Load(node, ROW)
        return self._elements[node]

    def _element(self, node: Node) -> Expr | None:
        source = node.args[0] if node.args else None
        if calls(node, aten.where.self, aten.masked_fill) and is_float(node):
            masked = self.masked_source(node)
            if masked is None or not same_shape(shape(masked[0]), shape(node)):
                return None
            return Masked(masked[1].ids, masked[1].bound, self.element(masked[0]))
        if calls(node, prims.iota):
            return ROW if arg(node, 1, "start", 0) == 0 and arg(node, 2, "step", 1) == 1 else None
        if calls(node, aten.arange.default):
            return ROW
        if calls(node, aten.arange.start, aten.arange.start_step):
            return ROW if node.args[0] == 0 and arg(node, 2, "step", 1) == 1 else None
        if not isinstance(source, Node):
            return None
        if calls(node, aten.add.Tensor) and arg(node, 1, "other") == 0:
            return self.element(source)
        if _is_getitem(node) and calls(source, aten.sort):
            return self._sorted(source, 0 if node.args[1] == 0 else 1)
        if calls(node, aten.argsort):
            return self._sorted(node, 1)
        if is_copy(node) or is_reshape(node) or (is_cast(node) and not is_float(node) and not is_float(source)):
            return self.element(source)
        if calls(node, aten.div.Tensor_mode) and node.kwargs.get("rounding_mode") in ("floor", "trunc"):
            return self._divided(source, node.args[1], FloorDiv)
        if calls(node, aten.floor_divide):
            return self._divided(source, node.args[1], FloorDiv)
        if calls(node, aten.remainder, aten.fmod):
            return self._divided(source, node.args[1], Mod)
        if calls(node, aten.clamp, aten.clamp_min, aten.clamp_max) and not is_float(node):
            return self._clamped(node, source)
        if calls(node, aten.expand):
            index = _expanded(shape(source), shape(node))
            return None if index is None else compose(self.element(source), index)
        if calls(node, aten.index_put, aten.scatter):
            return self._inverted(node)
        gathered = self.gather_index(node)
        if gathered is not None and len(shape(source)) == 1:
            return compose(self.element(source), gathered)
        return None

    def _sorted(self, sort: Node, output: int) -> Expr | None:
        source = sort_input(sort)
        sizes = shape(source)
        if any(not same(size, 1) for size in sizes[:-1]) or _descending(sort):
            return None
        inner = self.element(source)
        if output == 1 and isinstance(inner, Perm) and isinstance(inner.inner, Row):
            return inverse_perm(inner.sort, ROW)  # argsort of a permutation is its inverse
        order = perm(sort, ROW)
        return order if output == 1 else compose(inner, order)

    def _divided(self, source: Node, divisor: object, kind: type[FloorDiv] | type[Mod]) -> Expr | None:
        if not isinstance(divisor, int) or divisor < 1 or is_float(source):
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
        source = node.args[0]
        if calls(node, aten.index_put):
            indices, values, accumulate = node.args[1], node.args[2], arg(node, 3, "accumulate", False)
            index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
        else:
            index, values, accumulate = arg(node, 2, "index"), arg(node, 3, "src"), False
        if accumulate or not isinstance(index, Node) or not isinstance(values, Node) or len(shape(source)) != 1:
            return None
        order = self.element(index)
        if not isinstance(order, Perm | InversePerm) or not isinstance(order.inner, Row):
            return None
        if self.element(values) != ROW or not same_shape(shape(source), shape(index)):
            return None
        return inverse_perm(order.sort, ROW) if isinstance(order, Perm) else perm(order.sort, ROW)

    def gather_index(self, node: Node) -> Expr | None:
        """The row index of ``x[idx]`` along dimension 0, in any spelling."""
        index: Any = None
        if calls(node, aten.index.Tensor):
            indices = node.args[1]
            index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
        elif calls(node, aten.index_select, aten.gather) and arg(node, 1, "dim") == 0:
            index = arg(node, 2, "index")
            if calls(node, aten.gather) and len(shape(node.args[0])) != 1:
                return None
        if not isinstance(index, Node) or is_float(index) or tensor(index).dtype.is_complex:
            return None
        return self.element(index) if str(tensor(index).dtype) != "torch.bool" else None

    def rows(self, node: Node) -> Rows:
        """Follow the rows of a float tensor back through everything that only routes rows."""
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, Node):
            return Rows(node)
        gathered = self.gather_index(node)
        if gathered is not None and len(shape(source)) == 2:
            return self.rows(source).at(gathered)
        if is_copy(node):
            return self.rows(source)
        if calls(node, aten.where.self, aten.masked_fill):
            masked = self.masked_source(node)
            if masked is None or not same_shape(shape(masked[0]), shape(node)):
                return Rows(node)
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
        if calls(node, aten.expand):
            return _expanded(before[:-1], after[:-1])
        return ROW

    def masked_source(self, node: Node) -> tuple[Node, Mask] | None:
        """``(x, mask)`` of ``where(ids >= E, 0, x)`` or ``masked_fill``, with one id a row: sentinel rows set to zero."""
        if calls(node, aten.masked_fill):
            source, condition, zero = node.args
        elif calls(node, aten.where.self):
            condition, zero, source = node.args
        else:
            return None
        if not isinstance(source, Node) or not isinstance(condition, Node) or not is_zero(zero):
            return None
        mask = self._sentinel_mask(condition)
        if mask is None or not _one_per_row(shape(condition), shape(source)):
            return None
        return source, mask

    def _sentinel_mask(self, condition: Node) -> Mask | None:
        while is_copy(condition) or is_reshape(condition):
            condition = condition.args[0]  # type: ignore[assignment]
        if not calls(condition, aten.ge.Scalar, aten.gt.Scalar):
            return None
        ids, bound = condition.args
        if not isinstance(ids, Node) or not isinstance(bound, int) or is_float(ids):
            return None
        return Mask(self.element(ids), bound + (1 if calls(condition, aten.gt.Scalar) else 0))


def _one_per_row(condition: tuple[Any, ...], source: tuple[Any, ...]) -> bool:
    """Whether a condition has one element for each row (or, of a 1-D tensor, each element) of ``source``."""
    if len(source) == 1:
        return same_shape(condition, source)
    return len(condition) == len(source) and same_shape(condition[:-1], source[:-1]) and same(condition[-1], 1)


def is_zero(node: object) -> bool:
    """A scalar zero, or a tensor full of zeros."""
    if isinstance(node, Node):
        if calls(node, aten.full, aten.full_like):
            return arg(node, 1, "fill_value") == 0
        if calls(node, aten.scalar_tensor):
            return arg(node, 0, "s") == 0
        return calls(node, aten.zeros, aten.zeros_like)
    return isinstance(node, int | float) and node == 0


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and node.op == "call_function"


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
