"""One projection of an expert block: ``y[i] = weight[expert(i)] @ x[i] (+ bias[expert(i)])``, however it is spelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from moe_compile.passes.fx_utils import Unproven, describe, is_cast, is_copy, shape, source_of, swaps_last_two, tensor
from moe_compile.passes.row_expressions import Expr

# How the experts of the rows are given. "listed": row i belongs to expert ``expert(i)``. "sorted": the rows are grouped
# by expert, so row i belongs to the i-th smallest of the ids ``expert`` (an unsorted list of one id a slot).
Grouping = Literal["listed", "sorted"]


@dataclass(frozen=True)
class ExpertGemm:
    """A projection with one weight matrix an expert, found in a graph.

    Attributes:
        node: its result, (..., N) with one row a (token, k) slot, in flattened row-major order.
        x: its input rows, (..., K), as many.
        weight: the placeholder with all experts' weights, (E, N, K), or (E, K, N) if ``transposed``.
        expert: element expression of the expert ids, read as ``grouping`` says.
        interior: the nodes that exist only to compute ``node`` from ``x`` and ``weight``.
        clamped: the ids were clamped into the table before the weight was read; ``expert`` is without the clamp.
    """

    node: Node
    x: Node
    weight: Node
    transposed: bool
    grouping: Grouping
    expert: Expr
    interior: tuple[Node, ...]
    form: str
    clamped: bool = False

    @property
    def num_experts(self) -> int:
        return int(shape(self.weight)[0])

    @property
    def out_features(self) -> int:
        return int(shape(self.weight)[2 if self.transposed else 1])

    @property
    def in_features(self) -> int:
        return int(shape(self.weight)[1 if self.transposed else 2])


def weight_source(node: Node) -> tuple[Node, bool]:
    """The placeholder behind a (possibly transposed) weight, and whether its last two dimensions were swapped.

    Raises:
        Unproven: the weight is computed in the graph, or is not (experts, rows, columns) of static sizes.
    """
    swapped = False
    current = node
    while swaps_last_two(current) or is_copy(current):
        swapped ^= swaps_last_two(current)
        source = source_of(current)
        if source is None:
            break
        current = source
    if current.op != "placeholder":
        what = "is not a graph input"
        if is_cast(current):
            what = f"is cast to {tensor(current).dtype} in the graph"
        raise Unproven(
            f"the expert weight {what}: it is made by {describe(current)}, and only parameters and buffers are packed",
            current,
        )
    if len(shape(current)) != 3:
        raise Unproven(f"the expert weight has shape {tuple(shape(current))}, not (experts, rows, columns)", current)
    if not all(isinstance(size, int) for size in shape(current)):
        raise Unproven(f"the expert weight has a dynamic shape {tuple(shape(current))}", current)
    return current, swapped
