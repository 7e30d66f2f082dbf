"""Grouped GEMM: rows sorted by expert, one ``_grouped_mm`` over all groups.

    offs = cumsum(histc(sorted_ids, bins=E, min=0, max=E-1))
    y = _grouped_mm(x_sorted, weight (E, K, N), offs)

as transformers' ``grouped_mm_experts_forward`` spells it, and its fallback operator for other dtypes than bf16.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm, weight_source
from moe_compile.passes.fx_utils import Unproven, arg, aten, calls, describe, dim, is_cast, is_copy, is_float, same, shape
from moe_compile.passes.row_provenance import Expr, Load, Row, RowProvenance, is_bijection

FORM = "grouped_mm"


def _fallback() -> object:
    """transformers' own operator, if that library has been imported."""
    namespace = getattr(torch.ops, "transformers", None)
    return getattr(namespace, "grouped_mm_fallback", None) if namespace is not None else None


def is_candidate(node: Node) -> bool:
    """Whether a node is a grouped GEMM at all."""
    return calls(node, aten._grouped_mm, _fallback())


def match(node: Node, provenance: RowProvenance) -> ExpertGemm:
    """The projection behind a candidate.

    Raises:
        Unproven: it could not be shown that its groups are the experts of one list of ids.
    """
    x, weight, offs = node.args[0], node.args[1], arg(node, 2, "offs")
    if arg(node, 3, "bias") is not None:
        raise Unproven("the grouped GEMM has a bias argument of its own", node)
    if not isinstance(offs, Node) or not isinstance(x, Node) or not isinstance(weight, Node):
        raise Unproven("the grouped GEMM has no group offsets", node)
    if len(shape(x)) != 2 or len(shape(weight)) != 3:
        raise Unproven(f"the grouped GEMM is not rows times experts: {shape(x)} by {shape(weight)}", node)
    placeholder, swapped = weight_source(weight)
    num_experts = int(shape(placeholder)[0])
    ids = _offsets_of(offs, num_experts, provenance)
    return ExpertGemm(
        node=node,
        x=x,
        weight=placeholder,
        transposed=not swapped,  # the operator wants (E, K, N): a model that stores (E, N, K) transposes it
        grouping="sorted",
        expert=ids,
        interior=(node,),
        form=FORM,
    )


def _offsets_of(offs: Node, num_experts: int, provenance: RowProvenance) -> Expr:
    """The ids of which ``offs`` are the group ends: ``offs[e] = #{ids <= e}``, for ids in [0, E)."""
    current = offs
    while (is_cast(current) and not is_float(current)) or is_copy(current):
        current = current.args[0]  # type: ignore[assignment]
    if not calls(current, aten.cumsum) or dim(current, 1, "dim", 1) != 0:
        raise Unproven(f"the group offsets are made by {describe(current)}, not by a cumulative sum of counts", current)
    counts = current.args[0]
    while isinstance(counts, Node) and (is_cast(counts) or is_copy(counts)):
        counts = counts.args[0]
    if not isinstance(counts, Node) or not calls(counts, aten.histc, aten.bincount):
        raise Unproven(f"the group sizes are made by {describe(counts)}, not by histc or bincount", current)
    source = counts.args[0]
    if calls(counts, aten.histc):
        bins, low, high = arg(counts, 1, "bins", 100), arg(counts, 2, "min", 0), arg(counts, 3, "max", 0)
        if (bins, low, high) != (num_experts, 0, num_experts - 1):
            raise Unproven(
                f"the group sizes count ids {low}..{high} in {bins} bins, but the weight has {num_experts} experts", counts
            )
    elif not same(shape(counts)[0], num_experts):
        raise Unproven(f"bincount gives {shape(counts)[0]} groups, but the weight has {num_experts} experts", counts)
    while isinstance(source, Node) and is_cast(source):
        source = source.args[0]
    assert isinstance(source, Node)
    ids = provenance.element(source)
    if not isinstance(ids, Load) or not is_bijection(ids.inner):
        raise Unproven("the group sizes do not count every (token, k) slot once", counts)
    return Load(ids.base, Row())  # counting does not depend on the order
