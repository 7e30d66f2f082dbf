"""Find expert blocks in a graph and prove what they compute: ``MoEMatch``, or ``NearMiss`` with the reason.

A block is an up projection, a gate function, a down projection, routing weights and a sum over each token's slots. The
proof starts at the down projection, goes back through the gate function to the up projection and to the hidden states,
and forward to the sum. Everything is compared as index functions of the row, so at the end one thing is known: slot
``s = t * K + k`` takes row ``t`` of the hidden states, expert ``topk_ids[t, k]`` and weight ``topk_weights[t, k]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compile.passes import match_batched_mm, match_grouped_mm
from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import Unproven, is_float, module_path, same, same_shape, shape, source_location, static, tensor, value
from moe_compile.passes.gate_function import GateMatch, match_gate_function
from moe_compile.passes.row_provenance import (
    ROW,
    Expr,
    InversePerm,
    Load,
    Mask,
    Perm,
    RowProvenance,
    Rows,
    compose,
    floor_div,
    is_bijection,
    sort_input,
    without_clamp,
)
from moe_compile.passes.weighted_sum import WeightedSum, match_weighted_sum
from moe_compile.spec import ExpertSpec

MATCHERS = (match_grouped_mm, match_batched_mm)


@dataclass(frozen=True)
class MoEMatch:
    """One proven block. Tensors are graph nodes; ``top_k``, ``hidden_states`` and the ids may still need a reshape.

    ``root`` is the node that the operator's result replaces; ``interior`` holds the nodes that nothing else may use.
    """

    form: str
    root: Node
    hidden_states: Node
    topk_ids: Node
    topk_weights: Node
    gate_up_proj: Node
    down_proj: Node
    gate_up_bias: Node | None
    down_bias: Node | None
    spec: ExpertSpec
    name: str
    location: str | None
    interior: frozenset[Node] = field(repr=False, default=frozenset())


@dataclass(frozen=True)
class NearMiss:
    """Something that looks like an expert block and could not be proven to be one."""

    form: str
    reason: str
    node: Node
    name: str
    location: str | None


def find_experts(graph: Graph, static_inputs: set[Node] | None = None) -> list[MoEMatch | NearMiss]:
    """All expert blocks of a graph, in graph order.

    Args:
        graph: functional ATen, decomposed or not, with fake tensors in ``meta["val"]``.
        static_inputs: placeholders that hold parameters or buffers; None if unknown, then every placeholder counts.
    """
    provenance = RowProvenance()
    gemms: dict[Node, ExpertGemm] = {}
    failed: list[tuple[Node, str, Unproven]] = []
    for node in graph.nodes:
        for matcher in MATCHERS:
            if matcher.is_candidate(node):
                try:
                    gemm = matcher.match(node, provenance)
                    gemms[gemm.node] = gemm
                except Unproven as problem:
                    failed.append((node, matcher.FORM, problem))
    results: dict[Node, MoEMatch | NearMiss] = {}
    used: set[Node] = set()
    failures: list[tuple[ExpertGemm, Unproven]] = []
    for gemm in gemms.values():
        try:
            match = _prove(gemm, gemms, provenance, static_inputs)
        except Unproven as problem:
            failures.append((gemm, problem))
            continue
        results[match.root] = match
        used |= match.interior
    misses = [
        (gemm.node, _near_miss(gemm.node, gemm.form, problem))
        for gemm, problem in failures
        if gemm.node not in used and not _is_up_projection(gemm, failures, provenance)
    ]
    misses += [(node, _near_miss(node, form, problem)) for node, form, problem in failed if node not in used]
    for node, miss in misses:
        results[node] = miss
    order = {node: i for i, node in enumerate(graph.nodes)}
    return _one_miss_a_block([results[node] for node in sorted(results, key=order.__getitem__)])


def _is_up_projection(gemm: ExpertGemm, failures: list[tuple[ExpertGemm, Unproven]], provenance: RowProvenance) -> bool:
    """Whether the failure of a down projection behind this one tells more than this one's own."""
    return any(other is not gemm and _starts_from(other, gemm, provenance) for other, _ in failures)


def _starts_from(down: ExpertGemm, up: ExpertGemm, provenance: RowProvenance) -> bool:
    """Whether ``down`` reads the result of ``up`` through anything that keeps one row a slot."""
    stack, seen = [down.x], set()
    while stack:
        node = stack.pop()
        if node is up.node:
            return True
        found = value(node)
        if node in seen or node.op != "call_function" or (found is None and node.meta.get("val") is None):
            continue
        seen.add(node)
        if found is not None and (not is_float(node) or provenance.rows(node).index != ROW):
            continue  # routing, or the gather of the hidden states
        if found is not None and not (found.dim() >= 2 and same(found.shape[0], shape(down.x)[0])):
            continue
        stack.extend(node.all_input_nodes)
    return False


def _one_miss_a_block(found: list[MoEMatch | NearMiss]) -> list[MoEMatch | NearMiss]:
    """Both projections of one module usually fail together: the first reason stands for the block."""
    named: set[str] = set()
    kept: list[MoEMatch | NearMiss] = []
    for one in found:
        if isinstance(one, NearMiss):
            if one.name in named:
                continue
            named.add(one.name)
        kept.append(one)
    return kept


def _near_miss(node: Node, form: str, problem: Unproven) -> NearMiss:
    where = problem.node if problem.node is not None else node
    return NearMiss(form, problem.reason, where, module_path(node), source_location(where) or source_location(node))


def _prove(
    down: ExpertGemm, gemms: dict[Node, ExpertGemm], provenance: RowProvenance, static_inputs: set[Node] | None
) -> MoEMatch:
    gate = match_gate_function(down.x, gemms, provenance)
    up = gate.linear
    _check_projections(up, down, gate)
    total = match_weighted_sum(down, provenance)
    ids, weights, top_k = _check_routing(down, total, provenance)
    slot = total.weight_slot
    hidden = provenance.rows(up.x)
    # Row r of both projections is row of the sum ``total.row``; compare everything there.
    tokens = compose(hidden.index, total.row)
    if tokens != floor_div(slot, top_k):
        raise Unproven("the up projection's rows are not the hidden states of the slots that are summed", up.x)
    for masks, rows in ((gate.masks, total.row), (hidden.masks, total.row), (total.masks, ROW)):
        for mask in masks:
            _check_mask(mask, rows, ids, slot, up.num_experts)
    gate_up_bias = _check_bias(gate.bias, total.row, ids, slot, up)
    down_bias = _check_bias(total.bias, total.row, ids, slot, down)
    _check_sizes(hidden.base, ids, weights, total, up, top_k)
    _check_placeholders([up.weight, down.weight, gate_up_bias, down_bias], hidden.base, static_inputs)
    interior = frozenset((*up.interior, *down.interior, *gate.interior, *total.interior))
    _check_not_used_elsewhere(interior, total.root)
    spec = ExpertSpec(
        num_experts=up.num_experts,
        hidden_size=up.in_features,
        intermediate_size=down.in_features,
        top_k=top_k,
        gate=gate.gate,
        gate_up_layout=gate.gate_up_layout,
        up_first=gate.up_first,
        transposed=up.transposed,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_format=str(tensor(up.weight).dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float", "fp"),
        activation_dtype=tensor(hidden.base).dtype,
        routing_dtype=tensor(weights).dtype,
        out_dtype=tensor(total.root).dtype,
    )
    return MoEMatch(
        form=down.form,
        root=total.root,
        hidden_states=hidden.base,
        topk_ids=ids,
        topk_weights=weights,
        gate_up_proj=up.weight,
        down_proj=down.weight,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        spec=spec,
        name=module_path(down.node),
        location=source_location(down.node),
        interior=interior,
    )


def _check_projections(up: ExpertGemm, down: ExpertGemm, gate: GateMatch) -> None:
    if (up.grouping, up.expert) != (down.grouping, down.expert):
        raise Unproven("the two projections use different expert ids", down.node)
    if up.num_experts != down.num_experts:
        raise Unproven(f"the projections have {up.num_experts} and {down.num_experts} experts", down.node)
    if up.transposed != down.transposed:
        raise Unproven("one projection's weight is transposed, the other's is not", down.node)
    if up.in_features != down.out_features:
        raise Unproven(f"the block maps {up.in_features} features to {down.out_features}", down.node)
    if tensor(up.weight).dtype != tensor(down.weight).dtype:
        raise Unproven(
            f"the projections' weights differ in dtype: {tensor(up.weight).dtype} and {tensor(down.weight).dtype}", down.node
        )


def _check_routing(down: ExpertGemm, total: WeightedSum, provenance: RowProvenance) -> tuple[Node, Node, int]:
    """The ids, the routing weights and K; the expert of every summed slot is the id at that slot."""
    slot = total.weight_slot
    if down.grouping == "listed":
        expert = compose(down.expert, total.row)
        if not isinstance(expert, Load) or expert.inner != slot:
            raise Unproven("the experts' ids and the routing weights are not in the same order", down.node)
    else:
        assert isinstance(down.expert, Load)
        expert = down.expert
        orders = _sorts_in(slot) | _sorts_in(total.row)
        if not any(
            provenance.element(sort_input(order)) == expert and compose(Perm(order, ROW), total.row) == slot
            for order in orders
        ):
            raise Unproven("the rows are not sorted by the ids that the groups are made of", down.node)
    if total.top_k is not None:
        top_k = total.top_k
    else:
        sizes = shape(expert.base)
        if len(sizes) != 2 or static(sizes[-1]) is None:
            raise Unproven(f"the number of experts a token is not static: the ids have shape {tuple(sizes)}", expert.base)
        top_k = int(sizes[-1])
    if not is_bijection(slot) or total.token != floor_div(slot, top_k):
        raise Unproven("the weighted rows are not summed into the tokens that they belong to", total.root)
    return expert.base, total.weights, top_k


def _sorts_in(expr: Expr) -> set[Node]:
    found = set()
    while not isinstance(expr, type(ROW)):
        if isinstance(expr, Perm | InversePerm):
            found.add(expr.sort)
        expr = expr.inner  # type: ignore[attr-defined]
    return found


def _count(node: Node) -> Any:
    total: Any = 1
    for size in shape(node):
        total = total * size
    return total


def _check_mask(mask: Mask, rows: Expr, ids: Node, slot: Expr, num_experts: int) -> None:
    """A mask must zero sentinel slots alone: ``ids >= E`` with the slot's own id."""
    found = compose(mask.ids, rows)
    if mask.bound != num_experts or found != Load(ids, slot):
        raise Unproven(f"rows are set to zero by another condition than id >= {num_experts} of their own slot", ids)


def _check_bias(bias: Rows | None, rows: Expr, ids: Node, slot: Expr, gemm: ExpertGemm) -> Node | None:
    if bias is None:
        return None
    index = compose(bias.index, rows)
    if without_clamp(index, gemm.num_experts) != Load(ids, slot):
        raise Unproven("the bias is read at other ids than the weight", bias.base)
    if not same_shape(shape(bias.base), (gemm.num_experts, gemm.out_features)):
        raise Unproven(f"the bias has shape {tuple(shape(bias.base))}", bias.base)
    return bias.base


def _check_sizes(
    hidden: Node, ids: Node, weights: Node, total: WeightedSum, up: ExpertGemm, top_k: int
) -> None:
    tokens = total.tokens
    if not same_shape(shape(total.root)[-1:], (up.in_features,)):
        raise Unproven(f"the sum has {shape(total.root)[-1]} columns, the hidden states {up.in_features}", total.root)
    if not same(_count(hidden), tokens * up.in_features):
        raise Unproven(f"the hidden states {tuple(shape(hidden))} are not one row for each of the summed tokens", hidden)
    for node in (ids, weights):
        if not same(_count(node), tokens * top_k):
            raise Unproven(f"{node.name} has shape {tuple(shape(node))}, not (tokens, {top_k})", node)
    if not same(_count(up.node), tokens * top_k * up.out_features):
        raise Unproven("the projections compute more rows than there are slots", up.node)
    if tensor(ids).dtype not in (torch.int32, torch.int64):
        raise Unproven(f"the expert ids are {tensor(ids).dtype}", ids)
    for node in (hidden, weights, total.root):
        if not tensor(node).is_floating_point():
            raise Unproven(f"{node.name} is {tensor(node).dtype}, not floating point", node)


def _check_placeholders(nodes: list[Node | None], hidden: Node, static_inputs: set[Node] | None) -> None:
    device = tensor(hidden).device
    for node in nodes:
        if node is None:
            continue
        if static_inputs is not None and node not in static_inputs:
            raise Unproven(
                f"the expert weight {node.name} is not a parameter or buffer but an input computed elsewhere (a weight "
                "merged on the fly, or a plain tensor attribute): register it as a parameter or buffer",
                node,
            )
        if tensor(node).device != device:
            raise Unproven(f"the expert weight is on {tensor(node).device}, the hidden states on {device}", node)
        if not tensor(node).is_floating_point() or tensor(node).element_size() == 1:
            raise Unproven(f"the expert weight is {tensor(node).dtype} without block scales", node)


def _check_not_used_elsewhere(interior: frozenset[Node], root: Node) -> None:
    for node in interior:
        if node is root:
            continue
        for user in node.users:
            if user not in interior and user is not root:
                raise Unproven(
                    f"the intermediate value {node.name} is used outside the block as well, by {user.name}", node
                )
