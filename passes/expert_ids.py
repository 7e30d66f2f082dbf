"""What is known of the expert ids behind the rows of one block: masks, biases and ranges are checked against them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import (
    Unproven,
    arg,
    aten,
    calls,
    dim,
    is_cast,
    is_copy,
    is_getitem,
    is_index,
    is_reshape,
    rank,
    same_shape,
    shape,
    source_of,
    static,
)
from moe_compile.passes.row_expressions import ROW, Expr, Load, Mask, Perm, Rows, perm, sorts_in, without_clamp
from moe_compile.passes.row_provenance import RowProvenance, sort_input


@dataclass(frozen=True)
class SlotIds:
    """What is known of row ``i`` of the sum: it is of slot ``slot(i)``, so of expert ``ids.flatten()[slot(i)]``."""

    ids: Node
    slot: Expr
    num_experts: int
    provenance: RowProvenance

    def is_expert(self, found: Expr) -> bool:
        """Whether an expression is the row's own expert id.

        Two sorts of the same ids may order equal ids differently, but agree on the id at each place.
        """
        if found == Load(self.ids, self.slot):
            return True
        if not isinstance(found, Load) or found.base is not self.ids:
            return False
        place = found.inner
        return isinstance(place, Perm) and any(
            perm(order, place.inner) == self.slot
            and all(self.provenance.element(sort_input(sort)) == Load(self.ids, ROW) for sort in (order, place.sort))
            for order in (*sorts_in(place), *sorts_in(self.slot))
        )

    def check_mask(self, mask: Mask) -> None:
        """A mask must zero sentinel slots alone: ``ids >= E`` with the slot's own id."""
        if mask.bound != self.num_experts or not self.is_expert(mask.ids):
            raise Unproven(
                f"rows are set to zero by another condition than id >= {self.num_experts} of their own slot", self.ids
            )

    def check_bias(self, bias: Rows, gemm: ExpertGemm) -> Node:
        if not self.is_expert(without_clamp(bias.index, self.num_experts)) or bias.masks:
            raise Unproven("the bias is read at other ids than the weight", bias.base)
        if not same_shape(shape(bias.base), (gemm.num_experts, gemm.out_features)):
            raise Unproven(f"the bias has shape {tuple(shape(bias.base))}", bias.base)
        return bias.base

    def require_in_range(self) -> None:
        """The ids are clamped into the table and nothing zeroes those that were outside: none may be outside.

        Raises:
            Unproven: the ids are not indices of a top-k, sort or argmax over at most E columns.
        """
        node = self.ids
        while is_copy(node) or is_reshape(node) or (is_cast(node) and is_index(node) and is_index(source_of(node))):
            node = source_of(node) or node
        scores = node
        if is_getitem(node) and arg(node, 1, "index") == 1 and calls(source_of(node), aten.topk, aten.sort):
            scores = source_of(node) or node
        if calls(scores, aten.topk, aten.sort, aten.argsort, aten.argmax):
            values = source_of(scores)
            count = rank(values) or 0
            position = 2 if calls(scores, aten.topk) else 1
            columns = static(shape(values)[dim(scores, position, "dim", count, -1)]) if count else None
            if columns is not None and columns <= self.num_experts:
                return
        raise Unproven(
            f"expert ids are clamped into 0..{self.num_experts - 1} and used as those experts; where such ids are "
            "outside, the operator counts them as absent, and that none is could not be shown",
            self.ids,
        )
