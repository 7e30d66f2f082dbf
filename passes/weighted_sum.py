"""From the down projection forward to each token's sum: weighting, un-sorting and reduction, in any order that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    describe,
    dim,
    is_cast,
    is_copy,
    is_float,
    is_reshape,
    same,
    same_shape,
    shape,
    static,
)
from moe_compile.passes.gate_function import bias_operand
from moe_compile.passes.row_provenance import ROW, Expr, Load, Mask, Masked, RowProvenance, Rows, compose, floor_div, is_zero


@dataclass(frozen=True)
class WeightedSum:
    """What happens to the rows of the down projection.

    All expressions are functions of ``i``, the number of a row that enters the sum: it is row ``row(i)`` of the down
    projection, is multiplied by ``weights.flatten()[weight_slot(i)]`` and added to token ``token(i)`` of ``tokens``.
    """

    root: Node
    row: Expr
    weights: Node
    weight_slot: Expr
    token: Expr
    tokens: Any
    top_k: int | None
    bias: Rows | None
    masks: tuple[Mask, ...]
    interior: tuple[Node, ...]


@dataclass
class _Walk:
    """The value that has been reached: row ``i`` of ``node`` is row ``row(i)`` of the projection, times ``weight(i)``."""

    node: Node
    row: Expr
    weight: Load | None
    bias: Rows | None
    masks: list[Mask]

    def reindex(self, index: Expr) -> None:
        """Go on to the tensor whose row ``i`` is row ``index(i)`` of the present one."""
        self.row = compose(self.row, index)
        self.masks = [mask.at(index) for mask in self.masks]
        if self.bias is not None:
            self.bias = self.bias.at(index)
        if self.weight is not None:
            self.weight = Load(self.weight.base, compose(self.weight.inner, index))


def match_weighted_sum(down: ExpertGemm, provenance: RowProvenance) -> WeightedSum:
    """Follow the down projection to the sum over each token's experts.

    Raises:
        Unproven: another operator is in between, a value is used twice, or the weights are missing.
    """
    walk = _Walk(down.node, ROW, None, None, [])
    interior: list[Node] = []
    while True:
        interior.append(walk.node)
        user = _only_user(walk.node)
        found = _reduction(user, walk.node, provenance)
        if found is not None:
            token, tokens, top_k = found
            break
        _step(walk, user, provenance)
        walk.node = user
    if walk.weight is None:
        raise Unproven("no routing weights between the down projection and the sum over experts", user)
    root = user
    while len(root.users) == 1 and is_cast(next(iter(root.users))) and is_float(next(iter(root.users))):
        interior.append(root)
        root = next(iter(root.users))
    return WeightedSum(
        root=root,
        row=walk.row,
        weights=walk.weight.base,
        weight_slot=walk.weight.inner,
        token=token,
        tokens=tokens,
        top_k=top_k,
        bias=walk.bias,
        masks=tuple(walk.masks),
        interior=tuple(interior),
    )


def _only_user(node: Node) -> Node:
    users = list(node.users)
    outputs = [user for user in users if user.op == "output"]
    if outputs:
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
    if (is_cast(user) and is_float(user)) or is_copy(user):
        return
    if is_reshape(user) and len(shape(user)) >= 2 and same(shape(user)[-1], shape(node)[-1]):
        return
    if calls(user, aten.mul.Tensor):
        _weight(walk, user, provenance)
        return
    masked = provenance.masked_source(user)
    if masked is not None and masked[0] is node and same_shape(shape(user), shape(node)):
        walk.masks.append(masked[1])
        return
    if calls(user, aten.add.Tensor):
        bias = bias_operand(user, provenance)
        if bias is not None and bias[0] is node:
            if walk.weight is not None or walk.bias is not None:
                raise Unproven("a bias is added after the routing weights, or twice", user)
            walk.bias = bias[1]
            return
    if user.args and user.args[0] is node and len(shape(node)) == 2:
        index = provenance.gather_index(user)
        if index is not None:
            walk.reindex(index)
            return
    raise Unproven(f"{describe(user)} between the down projection and the sum over experts", user)


def _weight(walk: _Walk, user: Node, provenance: RowProvenance) -> None:
    others = [operand for operand in user.args if operand is not walk.node]
    if len(others) != 1 or not isinstance(others[0], Node):
        raise Unproven("the down projection's result is multiplied by something that is not a routing weight", user)
    other = others[0]
    if not same_shape(shape(other), (*shape(walk.node)[:-1], 1)):
        raise Unproven(
            f"the down projection's result {tuple(shape(walk.node))} is multiplied by {tuple(shape(other))}, "
            "which is not one routing weight a row",
            user,
        )
    if walk.weight is not None:
        raise Unproven("the rows are weighted twice", user)
    weight = provenance.element(other)
    while isinstance(weight, Masked):
        walk.masks.append(Mask(weight.ids, weight.bound))
        weight = weight.inner
    if not isinstance(weight, Load):
        raise Unproven("the routing weights are integers of the routing itself", user)
    walk.weight = weight


def _reduction(user: Node, node: Node, provenance: RowProvenance) -> tuple[Expr, Any, int | None] | None:
    """``(token of row i, number of tokens, K if the sum says it)`` if ``user`` sums rows into tokens."""
    sizes = shape(node)
    if calls(user, aten.sum.dim_IntList) and len(sizes) == 3:
        dims = arg(user, 1, "dim")
        if list(dims) in ([1], [-2]) and not arg(user, 2, "keepdim", False):
            top_k = static(sizes[1])
            if top_k is None:
                raise Unproven(f"the number of experts a token is not static: {tuple(sizes)}", user)
            return floor_div(ROW, top_k), sizes[0], top_k
        return None
    if len(sizes) != 2 or not user.args or not isinstance(user.args[0], Node) or len(shape(user.args[0])) != 2:
        return None
    target = user.args[0]
    index: Any = None
    if calls(user, aten.index_add) and dim(user, 1, "dim", 2) == 0 and arg(user, 3, "source") is node:
        index = arg(user, 2, "index") if user.kwargs.get("alpha", 1) == 1 else None
    elif calls(user, aten.scatter_add) and dim(user, 1, "dim", 2) == 0 and arg(user, 3, "src") is node:
        expanded = arg(user, 2, "index")
        if calls(expanded, aten.expand) and same(shape(expanded.args[0])[-1], 1):
            index = expanded.args[0]
    elif calls(user, aten.index_put) and arg(user, 2, "values") is node and arg(user, 3, "accumulate", False):
        indices = user.args[1]
        index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if not isinstance(index, Node):
        return None
    if not is_zero(target):
        raise Unproven("the rows are added to something that is not zero", user)
    return provenance.element(index), shape(target)[0], None
