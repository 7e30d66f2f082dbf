"""Find expert blocks in a graph and prove what they compute: ``MoEMatch``, or ``NearMiss`` with the reason.

A block is an up projection, a gate function, a down projection, routing weights and a sum over each token's slots. The
proof starts at the down projection, goes back through the gate function to the up projection and to the hidden states,
and forward to the sum. Everything is compared as index functions of the row, so at the end one thing is known: slot
``s = t * K + k`` takes row ``t`` of the hidden states, expert ``topk_ids[t, k]`` and weight ``topk_weights[t, k]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from moe_compile.passes import match_batched_mm, match_expert_loop, match_grouped_mm
from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.expert_ids import SlotIds
from moe_compile.passes.fx_utils import (
    INDICES,
    Unproven,
    is_float,
    module_path,
    numel,
    same,
    shape,
    source_location,
    static,
    tensor,
    value_users,
    without_float_casts,
)
from moe_compile.passes.gate_function import GateMatch, match_gate_function
from moe_compile.passes.match_expert_loop import LoopBlock
from moe_compile.passes.near_misses import Failure, NearMiss, near_misses
from moe_compile.passes.row_expressions import (
    ROW,
    Clamp,
    Load,
    Perm,
    Rows,
    compose,
    floor_div,
    is_injective,
    sorts_in,
)
from moe_compile.passes.row_provenance import RowProvenance, sort_input
from moe_compile.passes.unrecognised import unrecognised, weights_behind
from moe_compile.passes.weighted_sum import WeightedSum, match_weighted_sum
from moe_compile.spec import ExpertSpec

MATCHERS = (match_grouped_mm, match_batched_mm)


@dataclass(frozen=True)
class MoEMatch:
    """One proven block. Tensors are graph nodes; ``top_k``, ``hidden_states`` and the ids may still need a reshape.

    ``root`` is the node that the operator's result replaces; ``interior`` holds the nodes that nothing else may use.
    ``assertions`` always hold, have no users, and go with the block.
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
    assertions: tuple[Node, ...] = field(repr=False, default=())


def find_experts(graph: Graph, static_inputs: set[Node] | None = None) -> list[MoEMatch | NearMiss]:
    """All expert blocks of a graph, in graph order.

    Args:
        graph: functional ATen, decomposed or not, with fake tensors in ``meta["val"]``.
        static_inputs: placeholders that hold parameters or buffers; None if unknown, then every placeholder counts.
    """
    provenance = RowProvenance()
    gemms: dict[Node, ExpertGemm] = {}
    failures: list[Failure] = []
    for node in graph.nodes:
        for matcher in MATCHERS:
            if not matcher.is_candidate(node):
                continue
            try:
                gemm = matcher.match(node, provenance)
            except Unproven as problem:
                failures.append(Failure(node, tuple(node.all_input_nodes), matcher.FORM, problem, False))
                continue
            gemms[gemm.node] = gemm
    matches: dict[Node, MoEMatch] = {}
    used: set[Node] = set()
    for gemm in gemms.values():
        try:
            match = _prove(gemm, gemms, provenance, static_inputs)
        except Unproven as problem:
            failures.append(Failure(gemm.node, (gemm.x,), gemm.form, problem, True))
            continue
        matches[match.root] = match
        used |= match.interior
    loops, loop_failures = match_expert_loop.find_loops(graph, provenance)
    in_failed_loops: set[Node] = set()
    for loop in loops:
        try:
            match = _from_loop(loop, static_inputs)
        except Unproven as problem:
            in_failed_loops |= {loop.up.weight, loop.down.weight}
            failures.append(Failure(loop.down.node, (loop.down.x,), loop.down.form, problem, True))
            continue
        matches[match.root] = match
    for failed in loop_failures:
        in_failed_loops |= failed.known
        failures.append(Failure(failed.down.node, (failed.down.x,), failed.down.form, failed.problem, True))
    order = {node: i for i, node in enumerate(graph.nodes)}
    failures = sorted((f for f in failures if f.node not in used), key=lambda f: order[f.node])
    known = {source for failure in failures for source in weights_behind(failure.node)} | in_failed_loops
    known |= {weight for match in matches.values() for weight in (match.gate_up_proj, match.down_proj)}
    results: dict[Node, MoEMatch | NearMiss] = {
        **matches,
        **near_misses(failures, provenance),
        **unrecognised(graph, static_inputs, known),
    }
    return [results[node] for node in sorted(results, key=order.__getitem__)]


def _prove(
    down: ExpertGemm, gemms: dict[Node, ExpertGemm], provenance: RowProvenance, static_inputs: set[Node] | None
) -> MoEMatch:
    gate = match_gate_function(down.x, gemms, provenance)
    up = gate.linear
    _check_projections(up, down, gate)
    total = match_weighted_sum(down, provenance)
    ids = _check_routing(down, total, provenance)
    slot, top_k = total.weight_slot, total.top_k
    hidden, activation_dtype = _hidden_states(up.x, provenance)
    # Row r of both projections is row of the sum ``total.row``; compare everything there.
    if compose(hidden.index, total.row) != floor_div(slot, top_k):
        raise Unproven("the up projection's rows are not the hidden states of the slots that are summed", up.x)
    routing = SlotIds(ids, slot, up.num_experts, provenance)
    for masks, rows in ((gate.masks, total.row), (hidden.masks, total.row), (total.masks, ROW)):
        for mask in masks:
            routing.check_mask(mask.at(rows))
    gate_up_bias = None if gate.bias is None else routing.check_bias(gate.bias.at(total.row), up)
    down_bias = None if total.bias is None else routing.check_bias(total.bias, down)
    _check_sizes(hidden.base, ids, total, up)
    _check_weights([up.weight, down.weight, gate_up_bias, down_bias], hidden.base, static_inputs)
    clamped = (
        up.clamped or down.clamped or any(b is not None and isinstance(b.index, Clamp) for b in (gate.bias, total.bias))
    )
    if clamped and not total.sentinels_zeroed:
        routing.require_in_range()
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
        weight_format=_FORMATS[tensor(up.weight).dtype],
        activation_dtype=activation_dtype,
        routing_dtype=total.weights_dtype,
        out_dtype=tensor(total.root).dtype,
    )
    return MoEMatch(
        form=down.form,
        root=total.root,
        hidden_states=hidden.base,
        topk_ids=ids,
        topk_weights=total.weights,
        gate_up_proj=up.weight,
        down_proj=down.weight,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        spec=spec,
        name=module_path(down.node),
        location=source_location(down.node),
        interior=interior,
    )


def _from_loop(loop: LoopBlock, static_inputs: set[Node] | None) -> MoEMatch:
    """A proven loop as a match: what every form is held to besides its routing."""
    up, down, gate = loop.up, loop.down, loop.gate
    _check_projections(up, down, gate)
    for node in (loop.hidden, loop.weights, loop.root):
        if not is_float(node):
            raise Unproven(f"{node.name} is {tensor(node).dtype}, not floating point", node)
    top_k = static(shape(loop.ids)[1])
    if top_k is None:
        raise Unproven(f"{loop.ids.name} has shape {tuple(shape(loop.ids))}, not (tokens, K)", loop.ids)
    _check_weights([up.weight, down.weight], loop.hidden, static_inputs)
    _check_not_used_elsewhere(loop.interior, loop.root)
    spec = ExpertSpec(
        num_experts=up.num_experts,
        hidden_size=up.in_features,
        intermediate_size=down.in_features,
        top_k=top_k,
        gate=gate.gate,
        gate_up_layout=gate.gate_up_layout,
        up_first=gate.up_first,
        transposed=up.transposed,
        has_bias=False,
        weight_format=_FORMATS[tensor(up.weight).dtype],
        activation_dtype=loop.activation_dtype,
        routing_dtype=loop.weights_dtype,
        out_dtype=tensor(loop.root).dtype,
    )
    return MoEMatch(
        form=down.form,
        root=loop.root,
        hidden_states=loop.hidden,
        topk_ids=loop.ids,
        topk_weights=loop.weights,
        gate_up_proj=up.weight,
        down_proj=down.weight,
        gate_up_bias=None,
        down_bias=None,
        spec=spec,
        name=module_path(down.node),
        location=source_location(down.node),
        interior=loop.interior,
        assertions=loop.assertions,
    )


_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _check_projections(up: ExpertGemm, down: ExpertGemm, gate: GateMatch) -> None:
    if (up.grouping, up.expert) != (down.grouping, down.expert):
        raise Unproven("the two projections use different expert ids", down.node)
    if up.num_experts != down.num_experts:
        raise Unproven(f"the projections have {up.num_experts} and {down.num_experts} experts", down.node)
    if up.transposed != down.transposed:
        raise Unproven("one projection's weight is transposed, the other's is not", down.node)
    if up.in_features != down.out_features:
        raise Unproven(f"the block maps {up.in_features} features to {down.out_features}", down.node)
    kinds = tensor(up.weight).dtype, tensor(down.weight).dtype
    if kinds[0] != kinds[1]:
        raise Unproven(f"the projections' weights differ in dtype: {kinds[0]} and {kinds[1]}", down.node)


def _hidden_states(x: Node, provenance: RowProvenance) -> tuple[Rows, torch.dtype]:
    """The rows of the up projection, and the dtype that they have there: a cast may follow their routing."""
    rows = provenance.rows(x)
    if rows.index == ROW:
        source = without_float_casts(rows.base)
        behind = provenance.rows(source)
        if behind != Rows(source):
            rows = Rows(behind.base, behind.index, (*rows.masks, *behind.masks))
    return rows, tensor(x).dtype


def _check_routing(down: ExpertGemm, total: WeightedSum, provenance: RowProvenance) -> Node:
    """The ids: the expert of every summed row is the id at the slot whose weight it gets and whose token it adds to."""
    slot = total.weight_slot
    if down.grouping == "listed":
        expert = compose(down.expert, total.row)
        if not isinstance(expert, Load) or expert.inner != slot:
            raise Unproven("the experts' ids and the routing weights are not in the same order", down.node)
    else:
        assert isinstance(down.expert, Load)
        expert = down.expert
        orders = [*sorts_in(slot), *sorts_in(total.row)]
        if not any(
            provenance.element(sort_input(order)) == expert and compose(Perm(order, ROW), total.row) == slot
            for order in orders
        ):
            raise Unproven("the rows are not sorted by the ids that the groups are made of", down.node)
    if not is_injective(slot) or total.token != floor_div(slot, total.top_k):
        raise Unproven("the weighted rows are not summed into the tokens that they belong to", total.root)
    return expert.base


def _check_sizes(hidden: Node, ids: Node, total: WeightedSum, up: ExpertGemm) -> None:
    """The row functions hold for as many rows as there are slots, and every tensor has one row or element for each."""
    tokens, top_k = total.tokens, total.top_k
    *leading, columns = shape(total.root)
    if not same(columns, up.in_features) or not same(numel(leading), tokens):
        raise Unproven(f"the sum has shape {tuple(shape(total.root))}, not (tokens, {up.in_features})", total.root)
    if sum(static(size) is None for size in leading) > 1:
        raise Unproven(f"the sum has several dynamic sizes: {tuple(shape(total.root))}", total.root)
    if not same(shape(hidden)[-1], up.in_features) or not same(numel(shape(hidden)), tokens * up.in_features):
        raise Unproven(
            f"the hidden states {tuple(shape(hidden))} are not one row for each of the summed tokens", hidden
        )
    for node in (ids, total.weights):
        if not same(numel(shape(node)), tokens * top_k):
            raise Unproven(f"{node.name} has shape {tuple(shape(node))}, not (tokens, {top_k})", node)
    if not same(numel(shape(up.node)[:-1]), tokens * top_k):
        raise Unproven("the projections compute more rows than there are slots", up.node)
    if not same(total.rows, tokens * top_k):
        raise Unproven("not every slot's row is summed", total.root)
    if tensor(ids).dtype not in INDICES:
        raise Unproven(f"the expert ids are {tensor(ids).dtype}", ids)
    for node in (hidden, total.weights, total.root):
        if not is_float(node):
            raise Unproven(f"{node.name} is {tensor(node).dtype}, not floating point", node)


def _check_weights(nodes: list[Node | None], hidden: Node, static_inputs: set[Node] | None) -> None:
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
        if tensor(node).dtype not in _FORMATS:
            raise Unproven(
                f"the expert weight is {tensor(node).dtype} without block scales; bf16, fp16 and fp32 are packed", node
            )


def _check_not_used_elsewhere(interior: frozenset[Node], root: Node) -> None:
    for node in interior:
        # A constant may serve several blocks.
        if node is root or not node.all_input_nodes:
            continue
        for user in value_users(node):
            if user not in interior and user is not root:
                raise Unproven(
                    f"the intermediate value {node.name} is used outside the block as well, by {user.name}", node
                )
