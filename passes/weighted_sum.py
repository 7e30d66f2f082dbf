"""From the down projection forward to each token's sum: weighting, un-sorting, reduction, in any order that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    describe,
    dim,
    is_copy,
    is_float,
    is_float_cast,
    is_index,
    is_reshape,
    is_zero,
    numel,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    static,
    tensor,
    value_users,
    without_float_casts,
)
from moe_compile.passes.gate_region import bias_operand
from moe_compile.passes.row_expressions import ROW, Expr, FloorDiv, Load, Mask, Masked, Rows, compose, floor_div
from moe_compile.passes.row_provenance import RowProvenance


@dataclass(frozen=True)
class WeightedSum:
    """What happens to the rows of the down projection.

    All expressions are functions of ``i``, the number of one of ``rows`` rows that enter the sum: it is row ``row(i)``
    of the down projection, is multiplied by ``weights.flatten()[weight_slot(i)]`` (as ``weights_dtype``) and added to
    token ``token(i)`` of ``tokens``. ``bias`` and ``masks`` are functions of ``i`` as well. ``root`` is the sum, with
    the tokens in its leading dimensions, flattened in row-major order.
    """

    root: Node
    rows: Any
    row: Expr
    weights: Node
    weight_slot: Expr
    weights_dtype: torch.dtype
    token: Expr
    tokens: Any
    top_k: int
    bias: Rows | None
    masks: tuple[Mask, ...]
    sentinels_zeroed: bool
    interior: tuple[Node, ...]


@dataclass
class _Walk:
    """The value reached: row ``i`` of ``node`` is row ``row(i)`` of the down projection, times ``weight(i)``."""

    node: Node
    columns: int
    row: Expr
    weight: Load | None
    weight_dtype: torch.dtype
    bias: Rows | None
    masks: list[Mask]
    zeroed: bool = False  # by a mask, and nothing was added since

    @property
    def has_rows(self) -> bool:
        """Whether the last dimension is a row's columns; reshapes may have made it another in between.

        A single row may be 1-D.
        """
        sizes = shape(self.node)
        return len(sizes) >= 1 and same(sizes[-1], self.columns)

    def reindex(self, index: Expr) -> None:
        """Go on to the tensor whose row ``i`` is row ``index(i)`` of the present one."""
        self.row = compose(self.row, index)
        self.masks = [mask.at(index) for mask in self.masks]
        if self.bias is not None:
            self.bias = self.bias.at(index)
        if self.weight is not None:
            self.weight = Load(self.weight.base, compose(self.weight.inner, index))


@dataclass(frozen=True)
class _Sum:
    """Row ``i`` of what is summed goes to token ``token(i)`` of ``tokens``, ``top_k`` rows to each."""

    root: Node
    token: Expr
    tokens: Any
    top_k: int


def match_weighted_sum(down: ExpertGemm, provenance: RowProvenance) -> WeightedSum:
    """Follow the down projection to the sum over each token's experts.

    Raises:
        Unproven: another operator is in between, a value is used twice, or the weights are missing.
    """
    walk = _Walk(down.node, down.out_features, ROW, None, torch.float32, None, [])
    interior: list[Node] = []
    while True:
        try:
            user = _only_user(walk.node)
            found = _reduction(walk, user, provenance)
            if found is None:
                _step(walk, user, provenance)
        except Unproven:
            # A sum over one expert a token is often left out.
            if not _is_top_1(walk):
                raise
            found = _Sum(walk.node, ROW, numel(shape(walk.node)[:-1]), 1)
            user = walk.node
        if found is not None:
            break
        interior.append(walk.node)
        walk.node = user
    rows = numel(shape(walk.node)[:-1])
    if walk.weight is None:
        raise Unproven("no routing weights between the down projection and the sum over experts", user)
    if walk.node is not found.root:
        interior.append(walk.node)
    root = found.root
    while len(root.users) == 1 and _keeps_rows(next(iter(root.users)), down.out_features):
        interior.append(root)
        root = next(iter(root.users))
    return WeightedSum(
        root=root,
        rows=rows,
        row=walk.row,
        weights=walk.weight.base,
        weight_slot=walk.weight.inner,
        weights_dtype=walk.weight_dtype,
        token=found.token,
        tokens=found.tokens,
        top_k=found.top_k,
        bias=walk.bias,
        masks=tuple(walk.masks),
        sentinels_zeroed=walk.zeroed,
        interior=tuple(interior),
    )


def _keeps_rows(user: Node, columns: int) -> bool:
    """Whether ``user`` only changes the dtype of the sum or its leading dimensions (``squeeze`` after ``keepdim``)."""
    return is_float_cast(user) or (is_reshape(user) and len(shape(user)) == 2 and same(shape(user)[-1], columns))


def _is_top_1(walk: _Walk) -> bool:
    """Whether every row is already one token's whole sum: the weights are (tokens, 1) and in the tokens' order."""
    if walk.weight is None or walk.weight.inner != ROW or not walk.has_rows:
        return False
    sizes = shape(walk.weight.base)
    return len(sizes) == 2 and same(sizes[1], 1)


def _only_user(node: Node) -> Node:
    users = value_users(node)
    if any(user.op == "output" for user in users):
        raise Unproven(f"the intermediate value {node.name} is an output of the graph", node)
    if len(users) != 1:
        names = ", ".join(user.name for user in users) or "nothing"
        raise Unproven(f"the intermediate value {node.name} is used elsewhere (by {names})", node)
    return users[0]


def _step(walk: _Walk, user: Node, provenance: RowProvenance) -> None:
    """Account for one operator on the way.

    Raises:
        Unproven: it is not one that a block may have there.
    """
    node = walk.node
    if is_float_cast(user) or is_copy(user) or is_reshape(user):
        return  # whatever the shape: only one that ends in the columns again leads on
    if not walk.has_rows:
        raise Unproven(f"{describe(user)} on the down projection's result as {tuple(shape(node))}", user)
    if calls(user, aten.mul.Tensor):
        _weight(walk, user, provenance)
        return
    masked = provenance.masked_source(user) if rank(node) != 1 else None
    if masked is not None and masked[0] is node and same_shape(shape(user), shape(node)):
        walk.masks.append(masked[1])
        walk.zeroed = True
        return
    bias = bias_operand(user, provenance)
    if bias is not None and bias[0] is node:
        if walk.weight is not None or walk.bias is not None:
            raise Unproven("a bias is added after the routing weights, or twice", user)
        walk.bias, walk.zeroed = bias[1], False
        return
    if source_of(user) is node and rank(node) == 2:
        index = provenance.gather_index(user)
        if index is not None:
            walk.reindex(index)
            return
    raise Unproven(f"{describe(user)} between the down projection and the sum over experts", user)


def _weight(walk: _Walk, user: Node, provenance: RowProvenance) -> None:
    others = [operand for operand in user.args if operand is not walk.node]
    if len(others) != 1 or not isinstance(others[0], Node):
        raise Unproven("the down projection's result is multiplied by something that is not a routing weight", user)
    if not same_shape(shape(others[0]), (*shape(walk.node)[:-1], 1)):
        raise Unproven(
            f"the down projection's result {tuple(shape(walk.node))} is multiplied by {tuple(shape(others[0]))}, "
            "which is not one routing weight a row",
            user,
        )
    _take_weight(walk, others[0], user, provenance)


def _take_weight(walk: _Walk, node: Node, user: Node, provenance: RowProvenance) -> None:
    """Element ``i`` of ``node`` weighs row ``i``."""
    if walk.weight is not None:
        raise Unproven("the rows are weighted twice", user)
    if not is_float(node):
        raise Unproven(f"the routing weights are {tensor(node).dtype}, not floating point", user)
    weight = provenance.element(node)
    walk.weight_dtype = tensor(node).dtype
    while True:
        if isinstance(weight, Masked):
            walk.masks.append(Mask(weight.ids, weight.bound))
            walk.zeroed = True
            weight = weight.inner
        elif isinstance(weight, Load) and weight.inner == ROW and is_float_cast(weight.base):
            # A cast after the routing is the same as one before it, which the rewrite makes.
            source = without_float_casts(weight.base)
            inner = provenance.element(source)
            if inner == Load(source, ROW):
                break
            weight = inner
        else:
            break
    if not isinstance(weight, Load):
        raise Unproven("the routing weights are an integer function of the routing", user)
    walk.weight = weight


def _reduction(walk: _Walk, user: Node, provenance: RowProvenance) -> _Sum | None:
    """The sum over each token's rows, if ``user`` is that."""
    node = walk.node
    sizes = shape(node)
    if not walk.has_rows:
        return None
    if len(sizes) >= 3:
        if calls(user, aten.sum.dim_IntList):
            dims = arg(user, 1, "dim")
            if not isinstance(dims, list | tuple) or [d % len(sizes) for d in dims] != [len(sizes) - 2]:
                return None
        elif not _weighs_with_bmm(walk, user, provenance):
            return None
        top_k = static(sizes[-2])
        if top_k is None:
            raise Unproven(f"the number of experts a token is not static: {tuple(sizes)}", user)
        return _Sum(user, floor_div(ROW, top_k), numel(sizes[:-2]), top_k)
    index = _index_of_sum(user, node)
    target = source_of(user)
    if index is None or target is None or rank(target) != 2:
        return None
    if not is_zero(target):
        raise Unproven("the rows are added to something that is not zero", user)
    token = provenance.element(index)
    return _Sum(user, token, shape(target)[0], token.divisor if isinstance(token, FloorDiv) else 1)


def _weighs_with_bmm(walk: _Walk, user: Node, provenance: RowProvenance) -> bool:
    """Whether ``user`` is ``bmm(weights (T, 1, K), rows (T, K, H))``, the weighted sum at once."""
    if not calls(user, aten.bmm) or arg(user, 1, "mat2") is not walk.node:
        return False
    weights = arg(user, 0, "self")
    tokens, top_k, _ = shape(walk.node)
    if not isinstance(weights, Node) or not same_shape(shape(weights), (tokens, 1, top_k)):
        return False
    _take_weight(walk, weights, user, provenance)
    return True


def _index_of_sum(user: Node, node: Node) -> Node | None:
    """The token of each row of ``node`` (S, H) if ``user`` adds every row to one."""
    index: Any = None
    rows = numel(shape(node)[:-1])
    if calls(user, aten.index_add) and dim(user, 1, "dim", 2) == 0 and arg(user, 3, "source") is node:
        index = arg(user, 2, "index") if user.kwargs.get("alpha", 1) == 1 else None
    elif calls(user, aten.scatter_add) and dim(user, 1, "dim", 2) == 0 and arg(user, 3, "src") is node:
        expanded = arg(user, 2, "index")
        # The index may be smaller than the rows, and then only the rows and columns that it covers are added.
        if calls(expanded, aten.expand) and same_shape(shape(expanded), shape(node)):
            index = source_of(expanded)
            if not same_shape(shape(index), (rows, 1)):
                return None
    elif calls(user, aten.index_put, aten._unsafe_index_put) and arg(user, 2, "values") is node:
        indices = arg(user, 1, "indices")
        if arg(user, 3, "accumulate", False) and isinstance(indices, list | tuple) and len(indices) == 1:
            index = indices[0]
    if not isinstance(index, Node) or not is_index(index) or not same(numel(shape(index)), rows):
        return None
    return index
