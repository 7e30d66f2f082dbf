"""Batched GEMM: each slot's weight matrix is gathered, then one ``bmm`` over all slots.

    y = bmm(weight[ids] (S, N, K), x (S, K, 1))        as transformers' ``batched_mm_experts_forward``
    y = bmm(x (S, 1, K), weight[ids] (S, K, N))        for transposed weights

and the multiply-and-sum that Inductor makes of either under ``coordinate_descent_tuning``.
"""

from __future__ import annotations

from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm, weight_source
from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    describe,
    is_cast,
    is_copy,
    is_float,
    is_reshape,
    same,
    same_shape,
    shape,
)
from moe_compile.passes.row_provenance import RowProvenance, without_clamp

FORM = "batched_mm"


def is_candidate(node: Node) -> bool:
    """Whether a node multiplies by matrices gathered with an index."""
    return _operands(node) is not None


def _operands(node: Node) -> tuple[Node, Node] | None:
    """The two (S, ., .) operands of a bmm or of its multiply-and-sum form, one of which is gathered."""
    if calls(node, aten.bmm):
        first, second = node.args[:2]
    elif calls(node, aten.sum.dim_IntList) and list(node.args[1]) in ([2], [-2]) and not arg(node, 2, "keepdim", False):  # type: ignore[arg-type]
        # (A.unsqueeze(-1) * B.unsqueeze(1)).sum(2)
        product = node.args[0]
        if not calls(product, aten.mul.Tensor):
            return None
        left, right = product.args  # type: ignore[union-attr]
        if not (calls(left, aten.unsqueeze) and calls(right, aten.unsqueeze)):
            return None
        if left.args[1] not in (-1, 3) or right.args[1] != 1:  # type: ignore[union-attr]
            return None
        first, second = left.args[0], right.args[0]  # type: ignore[union-attr]
    else:
        return None
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    if _gathered(first) is None and _gathered(second) is None:
        return None
    return first, second


def _gathered(node: Node) -> Node | None:
    """The node that gathers 3-D weights with one 1-D index, behind casts, copies and transposition."""
    while is_cast(node) or is_copy(node) or _is_transpose(node):
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        node = source
    if calls(node, aten.index.Tensor):
        indices = node.args[1]
        index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    elif calls(node, aten.index_select) and arg(node, 1, "dim") == 0:
        index = arg(node, 2, "index")
    else:
        return None
    if not isinstance(index, Node) or len(shape(index)) != 1 or is_float(index) or len(shape(node.args[0])) != 3:
        return None
    return node


def _is_transpose(node: Node) -> bool:
    if calls(node, aten.permute):
        return list(node.args[1]) == [0, 2, 1]  # type: ignore[arg-type]
    return calls(node, aten.transpose) and {d % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[operator]


def match(node: Node, provenance: RowProvenance) -> ExpertGemm:
    """The projection behind a candidate.

    Raises:
        Unproven: the shapes are not one row times one matrix a slot, or the weight is computed in the graph.
    """
    operands = _operands(node)
    assert operands is not None
    first, second = operands
    weight_first = _gathered(first) is not None
    weights, vectors = (first, second) if weight_first else (second, first)
    gather = _gathered(weights)
    assert gather is not None
    between, swapped = _chain(weights, gather)
    placeholder, swapped_before = weight_source(gather.args[0])  # type: ignore[arg-type]
    swapped ^= swapped_before
    ids = gather.args[1][0] if calls(gather, aten.index.Tensor) else arg(gather, 2, "index")  # type: ignore[index]
    rows_dim = 2 if weight_first else 1
    if not same(shape(vectors)[rows_dim], 1):
        raise Unproven(f"the batched GEMM takes {shape(vectors)[rows_dim]} rows a slot, not one", node)
    x, x_nodes = _matrix_of_rows(vectors)
    result, tail = _squeezed(node, 2 if weight_first else 1)
    return ExpertGemm(
        node=result,
        x=x,
        weight=placeholder,
        # (S, N, K) on the left is the (E, N, K) layout; (S, K, N) on the right is the transposed one.
        transposed=(not weight_first) ^ swapped,
        grouping="listed",
        expert=without_clamp(provenance.element(ids), int(shape(placeholder)[0])),
        interior=(*between, gather, *x_nodes, *_product_nodes(node), node, *tail),
        form=FORM,
    )


def _chain(top: Node, bottom: Node) -> tuple[list[Node], bool]:
    nodes, swapped = [], False
    while top is not bottom:
        nodes.append(top)
        swapped ^= _is_transpose(top)
        top = top.args[0]  # type: ignore[assignment]
    return nodes, swapped


def _product_nodes(node: Node) -> list[Node]:
    if calls(node, aten.bmm):
        return []
    product = node.args[0]
    assert isinstance(product, Node)
    return [product, *(factor for factor in product.args if isinstance(factor, Node))]


def _matrix_of_rows(vectors: Node) -> tuple[Node, list[Node]]:
    """The (S, K) tensor behind ``x.unsqueeze(-1)`` or ``x.unsqueeze(1)``."""
    nodes = []
    current = vectors
    while is_reshape(current) or is_copy(current) or is_cast(current):
        source = current.args[0]
        assert isinstance(source, Node)
        nodes.append(current)
        if len(shape(source)) == 2 and same_shape([shape(source)[0]], [shape(vectors)[0]]):
            return source, nodes
        current = source
    raise Unproven(f"the rows of the batched GEMM come from {describe(current)} in an unknown shape", current)


def _squeezed(node: Node, unit_dim: int) -> tuple[Node, list[Node]]:
    """The (S, N) result of a product of shape (S, N, 1) or (S, 1, N), and the nodes on the way to it."""
    nodes: list[Node] = []
    current = node
    want = tuple(size for d, size in enumerate(shape(node)) if d != unit_dim)
    while not same_shape(shape(current), want):
        users = list(current.users)
        if len(users) != 1 or not (is_reshape(users[0]) or is_cast(users[0]) or is_copy(users[0])):
            raise Unproven("the result of the batched GEMM is used in its 3-D shape", current)
        current = users[0]
        nodes.append(current)
    return current, nodes
