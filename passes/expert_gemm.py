"""One projection of an expert block: ``y[i] = weight[expert(i)] @ x[i] (+ bias[expert(i)])``, however it is spelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from moe_compile.passes.fx_utils import Unproven, aten, calls, describe, dim, is_copy, prims, shape, tensor
from moe_compile.passes.row_provenance import Expr

# How the experts of the rows are given. "listed": row i belongs to expert ``expert(i)``. "sorted": the rows are grouped
# by expert, so row i belongs to the i-th smallest of the ids ``expert`` (an unsorted list of one id a slot).
Grouping = Literal["listed", "sorted"]


@dataclass(frozen=True)
class ExpertGemm:
    """A projection with one weight matrix an expert, found in a graph.

    Attributes:
        node: its result, (S, N) with one row a (token, k) slot.
        x: its input rows, (S, K).
        weight: the placeholder with all experts' weights, (E, N, K), or (E, K, N) if ``transposed``.
        expert: element expression of the expert ids, read as ``grouping`` says.
        interior: the nodes that exist only to compute ``node`` from ``x`` and ``weight``.
    """

    node: Node
    x: Node
    weight: Node
    transposed: bool
    grouping: Grouping
    expert: Expr
    interior: tuple[Node, ...]
    form: str

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
        Unproven: the weight is computed in the graph.
    """
    swapped = False
    current = node
    while current.op == "call_function":
        source = current.args[0]
        if not isinstance(source, Node):
            break
        if calls(current, aten.permute) and list(current.args[1]) == [0, 2, 1]:  # type: ignore[arg-type]
            swapped = not swapped
        elif calls(current, aten.transpose) and {dim(current, 1, "dim0", 3), dim(current, 2, "dim1", 3)} == {1, 2}:
            swapped = not swapped
        elif not is_copy(current):
            break
        current = source
    if current.op != "placeholder":
        what = "is not a graph input"
        if calls(current, prims.convert_element_type, aten._to_copy):
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
