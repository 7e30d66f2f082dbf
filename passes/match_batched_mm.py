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
    dim,
    is_copy,
    is_float_cast,
    is_index,
    is_reshape,
    numel,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    swaps_last_two,
)
from moe_compile.passes.row_expressions import Clamp, without_clamp
from moe_compile.passes.row_provenance import RowProvenance

FORM = "batched_mm"


def is_candidate(node: Node) -> bool:
    """Whether a node multiplies by matrices gathered with an index."""
    return _operands(node) is not None


def _operands(node: Node) -> tuple[Node, Node] | None:
    """The (S, M, K) and (S, K, N) operands of a bmm or of its multiply-and-sum form, one of which is gathered."""
    if calls(node, aten.bmm):
        first, second = arg(node, 0, "self"), arg(node, 1, "mat2")
    elif calls(node, aten.sum.dim_IntList):
        # (A.unsqueeze(-1) * B.unsqueeze(1)).sum(2)
        product = source_of(node)
        if rank(product) != 4 or not calls(product, aten.mul.Tensor) or arg(node, 2, "keepdim", False):
            return None
        if arg(node, 1, "dim") not in ([2], [-2]):
            return None
        left, right = arg(product, 0, "self"), arg(product, 1, "other")  # type: ignore[arg-type]
        if not (_unsqueezes(left, 3) and _unsqueezes(right, 1)):
            return None
        first, second = source_of(left), source_of(right)
    else:
        return None
    if rank(first) != 3 or rank(second) != 3:
        return None
    if _gathered(first) is None and _gathered(second) is None:
        return None
    # The multiplication would also broadcast.
    if not same(shape(first)[0], shape(second)[0]) or not same(shape(first)[2], shape(second)[1]):
        return None
    return first, second


def _unsqueezes(node: object, at: int) -> bool:
    return isinstance(node, Node) and calls(node, aten.unsqueeze) and rank(node) == 4 and dim(node, 1, "dim", 4) == at


def _gathered(node: Node) -> Node | None:
    """The node that gathers 3-D weights with one 1-D index, behind casts, copies and transposition."""
    while is_float_cast(node) or is_copy(node) or swaps_last_two(node):
        source = source_of(node)
        if source is None:
            return None
        node = source
    index = _index_of(node)
    weight = source_of(node)
    return node if rank(index) == 1 and is_index(index) and rank(weight) == 3 else None


def _index_of(gather: Node) -> object:
    if calls(gather, aten.index.Tensor, aten._unsafe_index.Tensor):
        indices = arg(gather, 1, "indices")
        return indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if calls(gather, aten.index_select.default) and arg(gather, 1, "dim") in (0, -3):
        return arg(gather, 2, "index")
    return None


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
    table, ids = source_of(gather), _index_of(gather)
    assert table is not None
    assert isinstance(ids, Node)
    placeholder, swapped_before = weight_source(table)
    swapped ^= swapped_before
    rows_dim = 2 if weight_first else 1
    if not same(shape(vectors)[rows_dim], 1):
        raise Unproven(f"the batched GEMM takes {shape(vectors)[rows_dim]} rows a slot, not one", node)
    slots, features = shape(vectors)[0], shape(vectors)[3 - rows_dim]
    x, x_nodes = _matrix_of_rows(vectors, slots, features)
    result, tail = _squeezed(node, slots, shape(weights)[1 if weight_first else 2])
    return ExpertGemm(
        node=result,
        x=x,
        weight=placeholder,
        # (S, N, K) on the left is the (E, N, K) layout; (S, K, N) on the right is the transposed one.
        transposed=(not weight_first) ^ swapped,
        grouping="listed",
        expert=without_clamp(provenance.element(ids), int(shape(placeholder)[0])),
        clamped=isinstance(provenance.element(ids), Clamp),
        interior=(*between, gather, *x_nodes, *_product_nodes(node), node, *tail),
        form=FORM,
    )


def _chain(top: Node, bottom: Node) -> tuple[list[Node], bool]:
    nodes, swapped = [], False
    while top is not bottom:
        nodes.append(top)
        swapped ^= swaps_last_two(top)
        source = source_of(top)
        assert source is not None
        top = source
    return nodes, swapped


def _product_nodes(node: Node) -> list[Node]:
    if calls(node, aten.bmm):
        return []
    product = source_of(node)
    assert product is not None
    return [product, *product.all_input_nodes]


def _matrix_of_rows(vectors: Node, slots: int, features: int) -> tuple[Node, list[Node]]:
    """The (..., K) tensor with one row a slot behind ``x.unsqueeze(-1)`` or ``x.unsqueeze(1)``."""
    nodes = []
    current = vectors
    while is_reshape(current) or is_copy(current) or is_float_cast(current):
        source = source_of(current)
        assert source is not None
        nodes.append(current)
        sizes = shape(source)
        # The elements are in row-major order, so a last dimension of K makes all others together the slots.
        if len(sizes) > 1 and same(sizes[-1], features) and same(numel(sizes[:-1]), slots):
            if len(sizes) == 2 or not (is_reshape(source) or is_copy(source) or is_float_cast(source)):
                return source, nodes
        current = source
    raise Unproven(f"the rows of the batched GEMM come from {describe(current)} in an unknown shape", current)


def _squeezed(node: Node, slots: int, features: int) -> tuple[Node, list[Node]]:
    """The (..., N) result of a product of shape (S, N, 1) or (S, 1, N), and the nodes on the way to it."""
    nodes: list[Node] = []
    current = node
    while not same_shape(shape(current), (slots, features)):
        users = list(current.users)
        if len(users) == 1 and (is_reshape(users[0]) or is_float_cast(users[0]) or is_copy(users[0])):
            current = users[0]
            nodes.append(current)
        elif nodes and rank(current) != 1 and same(shape(current)[-1], features):
            break  # (T, K, N)
        else:
            raise Unproven("the result of the batched GEMM is used in its 3-D shape", current)
    return current, nodes
