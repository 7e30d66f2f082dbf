"""Index expressions: functions from a row number ``i`` to an integer, and the tensors that are read with them.

Two rules turn equality of routings into equality of expressions: ``Perm(InversePerm(e)) = e`` and
``InversePerm(Perm(e)) = e``. Leading dimensions are flattened in row-major order throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


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
    """Expert ids without clamps into [0, E). What becomes of the ids that those change must be proven elsewhere."""
    while isinstance(ids, Clamp) and ids.low in (None, 0) and ids.high in (None, num_experts - 1):
        ids = ids.inner
    return ids


def is_injective(expr: Expr) -> bool:
    """Whether no two rows are mapped to one; onto as many elements as there are rows it visits each exactly once."""
    while isinstance(expr, Perm | InversePerm):
        expr = expr.inner
    return isinstance(expr, Row)


def sorts_in(expr: Expr) -> list[Node]:
    """The sort nodes of the permutations that an expression is made of, outermost first."""
    found: dict[Node, None] = {}
    while not isinstance(expr, Row):
        if isinstance(expr, Perm | InversePerm):
            found[expr.sort] = None
        assert isinstance(expr, FloorDiv | Mod | Perm | InversePerm | Load | Clamp | Masked)
        expr = expr.inner
    return list(found)


@dataclass(frozen=True)
class Mask:
    """Rows with ``ids(i) >= bound`` are set to zero."""

    ids: Expr
    bound: int

    def at(self, index: Expr) -> Mask:
        return Mask(compose(self.ids, index), self.bound)


@dataclass(frozen=True)
class Rows:
    """Row ``i`` of a tensor (all but its last dimension flattened) is row ``index(i)`` of ``base``, or 0 by a mask."""

    base: Node
    index: Expr = ROW
    masks: tuple[Mask, ...] = ()

    def at(self, index: Expr) -> Rows:
        """The tensor whose row ``i`` is row ``index(i)`` of this one."""
        return Rows(self.base, compose(self.index, index), tuple(mask.at(index) for mask in self.masks))
