"""Which slots are one expert's: ``topk_ids == e``, its non-zeros, and the routing weights that it chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compile.passes.fx_utils import (
    FLOATS,
    Unproven,
    arg,
    aten,
    calls,
    dim,
    has_dtype,
    is_cast,
    is_copy,
    is_float,
    is_float_cast,
    is_getitem,
    is_index,
    is_reshape,
    is_zero,
    prims,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    tensor,
)

_EXPERT = 2  # the axis of a one-hot encoding; 0 are tokens, 1 slots


@dataclass(frozen=True)
class ExpertMask:
    """``ids == expert``, with the axes of ``ids`` (tokens, slots) in another order."""

    ids: Node
    expert: int | None
    axes: tuple[int, ...]


@dataclass(frozen=True)
class MaskColumn:
    """The positions along one axis of ``ids`` at which a mask is set, in the order of ``nonzero``."""

    nonzero: Node
    mask: ExpertMask
    axis: int


def expert_mask(node: object) -> ExpertMask | None:
    """The mask that ``node`` is, non-zero for True: of one expert, or with an axis of all experts."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    source = source_of(node)
    if calls(node, aten.eq.Scalar):
        expert = arg(node, 1, "other")
        plain = rank(source) == 2 and is_index(source) and isinstance(expert, int) and not isinstance(expert, bool)
        return ExpertMask(source, expert, (0, 1)) if plain and source is not None else None
    if calls(node, aten.eq.Tensor):
        return _one_hot(source, arg(node, 1, "other"))
    inner = expert_mask(source)
    if inner is None or source is None:
        return None
    if is_copy(node) or (is_cast(node) and has_dtype(node, (torch.bool, torch.int32, torch.int64, *FLOATS))):
        return inner
    if calls(node, aten.ne.Scalar, aten.gt.Scalar) and arg(node, 1, "other") == 0:
        return inner
    count = len(inner.axes)
    if calls(node, aten.t) and count == 2:
        return ExpertMask(inner.ids, inner.expert, inner.axes[::-1])
    if calls(node, aten.permute):
        return ExpertMask(inner.ids, inner.expert, tuple(inner.axes[d % count] for d in arg(node, 1, "dims")))
    if calls(node, aten.transpose.int):
        axes = list(inner.axes)
        a, b = dim(node, 1, "dim0", count), dim(node, 2, "dim1", count)
        axes[a], axes[b] = axes[b], axes[a]
        return ExpertMask(inner.ids, inner.expert, tuple(axes))
    if calls(node, aten.select.int):
        at, index = dim(node, 1, "dim", count), arg(node, 2, "index")
        if inner.axes[at] != _EXPERT or not isinstance(index, int) or index < 0:
            return None
        return ExpertMask(inner.ids, index, inner.axes[:at] + inner.axes[at + 1 :])
    if calls(node, aten.squeeze) and rank(node) == rank(source):
        return inner
    return None


def _one_hot(spread: Node | None, numbers: object) -> ExpertMask | None:
    """``ids.unsqueeze(-1) == arange(E)``."""
    if not isinstance(numbers, Node) or spread is None or not is_index(spread) or rank(spread) != 3:
        return None
    ids = source_of(spread)
    if not is_reshape(spread) or ids is None or rank(ids) != 2 or not same(shape(spread)[2], 1):
        return None
    if not same(shape(spread)[0], shape(ids)[0]) or rank(numbers) != 1 or not _counts_up(numbers):
        return None
    return ExpertMask(ids, None, (0, 1, _EXPERT))


def _counts_up(node: Node) -> bool:
    """0, 1, 2, ..."""
    if calls(node, prims.iota):
        return bool(arg(node, 1, "start", 0) == 0 and arg(node, 2, "step", 1) == 1)
    if calls(node, aten.arange.start, aten.arange.start_step):
        return bool(arg(node, 0, "start") == 0 and arg(node, 2, "step", 1) == 1)
    return calls(node, aten.arange.default)


def mask_column(node: Node) -> MaskColumn | None:
    """``node`` as one of the results of ``torch.where(mask)``."""
    source = source_of(node)
    if source is None:
        return None
    if is_getitem(node) and calls(source, aten.unbind.int) and dim(source, 1, "dim", 2) == 1:
        nonzero, column = source_of(source), arg(node, 1, "index")
    elif calls(node, aten.select.int) and dim(node, 1, "dim", rank(source) or 1) == 1:
        nonzero, column = source, arg(node, 2, "index")
    else:
        return None
    if nonzero is None or not calls(nonzero, aten.nonzero.default) or column not in (0, 1):
        return None
    mask = expert_mask(source_of(nonzero))
    if mask is None or mask.expert is None or sorted(mask.axes) != [0, 1]:
        return None
    return MaskColumn(nonzero, mask, mask.axes[column])


def row_weight(node: Node, token: MaskColumn) -> tuple[Node, torch.dtype]:
    """The routing weights behind ``weights[token, slot, None]``, and their dtype in the product.

    Raises:
        Unproven: the factor is not that, with the non-zeros of the same mask.
    """
    dtype = tensor(node).dtype
    if not same(shape(node)[-1], 1) or rank(node) != 2:
        raise Unproven("an expert's result is not multiplied by one number a row", node)
    node = _one_cast(_plain(node), node)
    gathered = _plain(node)
    source = source_of(gathered)
    if calls(gathered, aten.index.Tensor) and source is not None:
        columns = [mask_column(i) if isinstance(i, Node) else None for i in arg(gathered, 1, "indices")]
        right = [MaskColumn(token.nonzero, token.mask, axis) for axis in (0, 1)]
        base = source_of(source) if rank(source) == 3 and calls(source, aten.unsqueeze) else source
        if base is not None and rank(base) == 2 and is_float(base) and columns == right:
            if base is source or same_shape(shape(source), (*shape(base), 1)):
                return base, dtype
    raise Unproven("an expert's result is not multiplied by the routing weights of the slots that it computes", node)


def masked_weights(node: Node) -> tuple[ExpertMask, Node, torch.dtype]:
    """``(mask, weights, dtype)`` of ``where(ids == e, weights, 0).sum(-1)``, one number a token.

    Raises:
        Unproven: the factor is not that.
    """
    dtype = tensor(node).dtype
    if rank(node) != 2 or not same(shape(node)[1], 1):
        raise Unproven("an expert's result is not multiplied by one number a row", node)
    total = _plain(_one_cast(_plain(node), node))
    chosen = source_of(total)
    if chosen is None or not calls(total, aten.sum.dim_IntList) or [d % 2 for d in arg(total, 1, "dim")] != [1]:
        raise Unproven("an expert's factor is not a sum over the slots of a token", node)
    for mask, weights in _choices(chosen):
        found = expert_mask(mask)
        # Casts of the sum or of the weights alone: a sum in another dtype is another sum.
        if found is not None and found.axes == (0, 1) and isinstance(weights, Node) and is_float(weights):
            if found.expert is not None and rank(weights) == 2 and tensor(total).dtype == tensor(weights).dtype:
                return found, weights, dtype
    raise Unproven("an expert's factor is not the sum of the routing weights of the slots with its id", node)


def _choices(node: Node) -> list[tuple[object, object]]:
    """``(mask, weights)`` of ``where(mask, weights, 0)`` or a product with the mask."""
    if calls(node, aten.where.self) and is_zero(arg(node, 2, "other")):
        return [(node.args[0], node.args[1])]
    if calls(node, aten.mul.Tensor):
        return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
    return []


def _plain(node: Node) -> Node:
    """Without views that add or drop dimensions of size 1 after the rows, and copies."""
    while is_copy(node) or (rank(node) in (1, 2) and (is_reshape(node) or _selects_only_column(node))):
        source = source_of(node)
        if source is None or rank(source) not in (1, 2) or not same(shape(source)[0], shape(node)[0]):
            break
        node = source
    return node


def _selects_only_column(node: Node) -> bool:
    """``column[:, 0]`` of an (n, 1) tensor."""
    source = source_of(node)
    return (
        calls(node, aten.select.int) and rank(source) == 2 and dim(node, 1, "dim", 2) == 1 and same(shape(source)[1], 1)
    )


def _one_cast(node: Node, original: Node) -> Node:
    """The source of one change of float dtype; two are another rounding, which no routing dtype says."""
    if not is_float_cast(node):
        return node
    source = source_of(node)
    assert source is not None
    if is_float_cast(_plain(source)):
        raise Unproven("the routing weights are cast more than once", original)
    return source
