"""Grouped GEMM: rows sorted by expert, one ``_grouped_mm`` over all groups.

    offs = cumsum(histc(sorted_ids, bins=E, min=0, max=E-1))
    y = _grouped_mm(x_sorted, weight (E, K, N), offs)

as transformers' ``grouped_mm_experts_forward`` spells it, and its fallback operator for other dtypes than bf16.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moe_compile.passes.expert_gemm import ExpertGemm, weight_source
from moe_compile.passes.fx_utils import (
    INDICES,
    Unproven,
    arg,
    aten,
    calls,
    describe,
    dim,
    has_dtype,
    is_cast,
    is_copy,
    numel,
    same,
    shape,
    source_of,
    tensor,
)
from moe_compile.passes.row_expressions import ROW, Expr, Load, is_injective
from moe_compile.passes.row_provenance import RowProvenance

FORM = "grouped_mm"

# Counts up to 2**24 and more are exact in these; a float32 count is what histc gives on a CPU.
_COUNTS = (*INDICES, torch.float32, torch.float64)
# The integers up to here are exact, and rounding is monotonic: a larger id stays outside of the bins.
_EXACT_UP_TO = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


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
    x, weight, offs = arg(node, 0, "input"), arg(node, 1, "weight"), arg(node, 2, "offs")
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
    current = _counts_behind(offs)
    if not calls(current, aten.cumsum) or dim(current, 1, "dim", 1) != 0:
        raise Unproven(f"the group offsets are made by {describe(current)}, not by a cumulative sum of counts", current)
    if not has_dtype(current, _COUNTS):
        raise Unproven(f"the group offsets are summed in {tensor(current).dtype}, which overflows", current)
    source = source_of(current)
    assert source is not None
    counts = _counts_behind(source)
    if not calls(counts, aten.histc, aten.bincount):
        raise Unproven(f"the group sizes are made by {describe(counts)}, not by histc or bincount", current)
    counted = source_of(counts)
    assert counted is not None
    if calls(counts, aten.histc):
        bins, low, high = arg(counts, 1, "bins", 100), arg(counts, 2, "min", 0), arg(counts, 3, "max", 0)
        if (bins, low, high) != (num_experts, 0, num_experts - 1):
            raise Unproven(
                f"the group sizes count ids {low}..{high} in {bins} bins, but the weight has {num_experts} experts",
                counts,
            )
        if not has_dtype(counts, _COUNTS):
            raise Unproven(f"the group sizes are counted in {tensor(counts).dtype}, which is not exact", counts)
    elif arg(counts, 1, "weights") is not None:
        raise Unproven("the group sizes are weighted counts", counts)
    elif not same(shape(counts)[0], num_experts):
        raise Unproven(f"bincount gives {shape(counts)[0]} groups, but the weight has {num_experts} experts", counts)
    ids_node = _ids_behind(counted, num_experts)
    ids = provenance.element(ids_node)
    if (
        not isinstance(ids, Load)
        or not is_injective(ids.inner)
        or not same(numel(shape(ids_node)), numel(shape(ids.base)))
    ):
        raise Unproven("the group sizes do not count every (token, k) slot once", counts)
    return Load(ids.base, ROW)  # counting does not depend on the order


def _counts_behind(node: Node) -> Node:
    """What was cast to ``node``, through dtypes that hold every count."""
    while is_copy(node) or (is_cast(node) and has_dtype(node, _COUNTS)):
        source = source_of(node)
        assert source is not None
        node = source
    return node


def _ids_behind(node: Node, num_experts: int) -> Node:
    """The integer ids that were cast for counting, where the cast keeps every id apart."""
    while is_cast(node):
        dtype = tensor(node).dtype
        if dtype not in INDICES and num_experts > _EXACT_UP_TO.get(dtype, 0):
            raise Unproven(f"the expert ids are counted as {dtype}, which does not tell {num_experts} apart", node)
        source = source_of(node)
        assert source is not None
        node = source
    return node
