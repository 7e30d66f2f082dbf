"""The pointwise sub-graph between the two GEMMs, recognised by evaluating it.

Its nodes are replayed in float64 on probe values, with changes of float dtype left out, so that what is compared is
the real-valued function. Candidates take their parameters (limits, alpha, offsets) from the constants in the sub-graph;
one is accepted only if it agrees at every probe of every column. Each column gets probe values of its own, so which
column is gate, which is up, and how the two interleave fall out of the same comparison.

The probes cover the line from -30 to 30, large values, and each constant of the sub-graph with its close neighbours on
both sides, in all sign combinations: a piecewise function of the allowed operators that agrees there is the candidate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import FLOATS, Unproven, aten, calls, describe, is_cast, is_copy, same, shape, tensor
from moe_compile.passes.row_provenance import Clamp, Load, Mask, RowProvenance, Rows
from moe_compile.spec import ACTIVATIONS, GateFunction
from moe_compile.torch_internals import real_tensors

# Operators whose value at one position depends on the same position of their operands alone.
_POINTWISE = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.reciprocal, aten.abs, aten.sign,
    aten.exp, aten.expm1, aten.log1p, aten.sigmoid, aten.tanh, aten.erf, aten.pow, aten.square, aten.sqrt,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.minimum, aten.maximum, aten.hardtanh, aten.softplus,
    aten.relu, aten.relu6, aten.silu, aten.gelu, aten.leaky_relu, aten.elu, aten.mish, aten.hardswish,
    aten.where, aten.ge, aten.gt, aten.le, aten.lt, aten.eq, aten.ne, aten.logical_and, aten.logical_or,
    aten.logical_not, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not,
}  # fmt: skip
# Operators that only choose or re-arrange columns; dimension 0 (rows) must stay as it is.
_STRUCTURAL = {
    aten.split, aten.split_with_sizes, aten.chunk, aten.slice, aten.select, aten.unbind, aten.squeeze, aten.unsqueeze,
    aten.reshape, aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.expand, aten.cat,
}  # fmt: skip
_CONSTANTS = {aten.full, aten.scalar_tensor, aten.full_like, aten.ones_like, aten.zeros_like}

_PROBE_ROWS = 64
_MAX_CONSTANTS = 6
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class GateMatch:
    """A proven gate function with the layout of the columns that it reads.

    ``linear`` is the projection it starts from, ``bias`` what was added to it, ``masks`` the sentinel masks applied on
    the way, ``interior`` the nodes of the sub-graph.
    """

    linear: ExpertGemm
    gate: GateFunction
    gate_up_layout: str
    up_first: bool
    bias: Rows | None
    masks: tuple[Mask, ...]
    interior: tuple[Node, ...]


@dataclass
class _Region:
    """Nodes from one projection to ``result``, in graph order."""

    linear: ExpertGemm
    nodes: list[Node]
    bias: Rows | None
    masks: list[Mask]
    skipped: dict[Node, Node]  # bias additions and masks: stand for this operand of theirs


def match_gate_function(result: Node, gemms: dict[Node, ExpertGemm], provenance: RowProvenance) -> GateMatch:
    """Prove what is computed between a projection in ``gemms`` and ``result``, the down projection's input rows.

    Raises:
        Unproven: the sub-graph holds an operator that is not pointwise, starts from no or several projections, or its
            function is none of the known ones.
    """
    region = _collect(result, gemms, provenance)
    width = region.linear.out_features
    out_width = shape(result)[-1]
    if not isinstance(out_width, int) or out_width not in (width, width // 2) or (out_width != width and width % 2):
        raise Unproven(f"{width} columns become {out_width}: neither a gate and an up half nor a plain activation", result)
    gated = out_width * 2 == width
    constants = _constants(region)
    known = provenance.memo.setdefault(_signature(region, result), [])
    if known:
        gate, layout, up_first = known[0]
        return GateMatch(region.linear, gate, layout, up_first, region.bias, tuple(region.masks), tuple(region.nodes))
    with real_tensors():
        found = _search(region, result, constants, gated)
    if found is None:
        names = ", ".join(dict.fromkeys(_short_name(n) for n in region.nodes if not is_cast(n) and n not in region.skipped))
        shown = ", ".join(f"{c:g}" for c in constants)
        raise Unproven(
            f"the gate function is none of the known ones (operators: {names}; constants: {shown or 'none'})", result
        )
    known.append(found)
    return GateMatch(region.linear, *found, region.bias, tuple(region.masks), tuple(region.nodes))


def _short_name(node: Node) -> str:
    return describe(node).removeprefix("aten.").split(".")[0]


def _search(
    region: _Region, result: Node, constants: list[float], gated: bool
) -> tuple[GateFunction, str, bool] | None:
    """The candidate and layout that agree with the region at every probe."""
    width, out_width = region.linear.out_features, shape(result)[-1]
    inputs = _probes(constants, _PROBE_ROWS, width)
    outputs = _replay(region, result, inputs)
    if outputs.shape != (_PROBE_ROWS, out_width):
        raise Unproven(f"the gate function turns {width} columns into {tuple(outputs.shape[1:])}", result)
    layouts = [("concatenated", False), ("interleaved", False), ("concatenated", True), ("interleaved", True)]
    for gate in _candidates(constants, gated):
        for layout, up_first in layouts if gated else layouts[:1]:
            if _agrees(gate, layout, up_first, inputs, outputs):
                return gate, layout, up_first
    return None


def _signature(region: _Region, result: Node) -> Hashable:
    """Equal for two regions that compute the same thing: the layers of a model are searched once."""
    names: dict[Node, str] = {region.linear.node: f"in{region.linear.out_features}"}
    lines = []
    for i, node in enumerate(region.nodes):
        names[node] = f"n{i}"
        if node in region.skipped:
            lines.append(f"n{i}={names[region.skipped[node]]}")
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: names.get(n, "?"))
            lines.append(f"n{i}={node.target}{args}{kwargs}")
    return (*lines, names[result], str(shape(result)[-1]))


def _collect(result: Node, gemms: dict[Node, ExpertGemm], provenance: RowProvenance) -> _Region:
    found: dict[Node, ExpertGemm] = {}
    seen: set[Node] = set()
    skipped: dict[Node, Node] = {}
    biases: dict[Node, Rows] = {}
    masks: list[Mask] = []
    stack = [result]
    while stack:
        node = stack.pop()
        if node in seen or node in found:
            continue
        if node in gemms:
            found[node] = gemms[node]
            continue
        if node.op != "call_function":
            raise Unproven(f"the down projection's input depends on {describe(node)}, which is not the up projection", node)
        seen.add(node)
        masked = provenance.masked_source(node)
        if masked is not None:
            skipped[node], mask = masked
            masks.append(mask)
            stack.append(skipped[node])
            continue
        bias = bias_operand(node, provenance)
        if bias is not None:
            skipped[node], biases[node] = bias
            stack.append(skipped[node])
            continue
        _check_allowed(node)
        stack.extend(node.all_input_nodes)
    if len(found) != 1:
        if not found:
            raise Unproven("no expert projection leads to the input of this one", result)
        raise Unproven(f"{len(found)} projections lead to the down projection's input: separate gate and up weights", result)
    ((start, linear),) = found.items()
    for node in biases:
        if not _is_plain(skipped[node], start, skipped):
            raise Unproven("a bias is added after the up projection was changed", node)
    if len(biases) > 1:
        raise Unproven("more than one bias is added to the up projection", next(iter(biases)))
    order = {node: i for i, node in enumerate(result.graph.nodes)}
    return _Region(linear, sorted(seen, key=order.__getitem__), next(iter(biases.values()), None), masks, skipped)


def _is_plain(node: Node, start: Node, skipped: dict[Node, Node]) -> bool:
    """Whether ``node`` is the projection itself, up to casts, copies and masks."""
    while node is not start:
        if node in skipped:
            node = skipped[node]
        elif is_cast(node) or is_copy(node):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return False
    return True


def bias_operand(node: Node, provenance: RowProvenance) -> tuple[Node, Rows] | None:
    """``(x, rows of the bias table)`` of ``x + bias[ids]``, with ``bias`` a 2-D graph input."""
    if not calls(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    for x, other in (node.args, node.args[::-1]):
        if isinstance(x, Node) and isinstance(other, Node):
            rows = provenance.rows(_uncast(other))
            by_expert = isinstance(rows.index, Load | Clamp)
            if by_expert and rows.base.op == "placeholder" and len(shape(rows.base)) == 2:
                return x, rows
    return None


def _uncast(node: Node) -> Node:
    while is_cast(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _check_allowed(node: Node) -> None:
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(node.target, "__name__", "") == "getitem":
        return
    if is_cast(node):
        if tensor(node).dtype not in FLOATS:
            raise Unproven(f"the gate function converts to {tensor(node).dtype}", node)
        return
    if packet in _CONSTANTS or is_copy(node):
        return
    if packet in _POINTWISE:
        if any(isinstance(a, Node) and a.op == "placeholder" for a in node.all_input_nodes):
            raise Unproven("the gate function reads another input of the graph", node)
        return
    if packet in _STRUCTURAL:
        values = node.meta.get("val")
        rows = shape(node.args[0])[0] if isinstance(node.args[0], Node) else None
        moved = packet in (aten.permute, aten.transpose) and 0 in _moved_dims(node)
        if packet is aten.cat or moved:
            raise Unproven(f"{describe(node)} inside the gate function re-arranges its input", node)
        for one in values if isinstance(values, list | tuple) else [values]:
            if rows is None or not isinstance(one, torch.Tensor) or one.dim() < 2 or not same(one.shape[0], rows):
                raise Unproven(f"{describe(node)} inside the gate function moves rows", node)
        return
    raise Unproven(f"{describe(node)} between the two projections is not a pointwise operator", node)


def _moved_dims(node: Node) -> list[int]:
    rank = len(shape(node))
    if calls(node, aten.permute):
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr, operator]
        return [d for d, source in enumerate(order) if d != source]
    return [d % rank for d in node.args[1:3]]  # type: ignore[operator]


def _constants(region: _Region) -> list[float]:
    """Every finite number among the arguments, by magnitude, plus those that an alpha or a limit could be."""
    numbers: set[float] = set()
    for node in region.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node in region.skipped or not (packet in _POINTWISE or packet in _CONSTANTS):
            continue
        values = [*node.args, *(v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory"))]
        if packet is aten.full:
            values = values[1:]
        for number in values:
            if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e9:
                numbers.add(abs(float(number)))
    if len(numbers) > _MAX_CONSTANTS:
        raise Unproven(f"the gate function has {len(numbers)} constants, more than any known one", region.nodes[-1])
    return sorted(numbers)


def _probes(constants: list[float], rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) float64 probes; every column holds its own mixture of the special and the spread values."""
    generator = torch.Generator().manual_seed(20260101)
    near = [s * (c + d) for c in [0.0, *constants] for d in (-0.5, -1e-4, 0.0, 1e-4, 0.5) for s in (1.0, -1.0)]
    special = torch.tensor([*near, 12.0, -12.0, -1.0, 2.0, 30.0, -30.0, 300.0, -300.0], dtype=torch.float64)
    probes = torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 60 - 30
    small = torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 6 - 3
    which = torch.randint(0, 3, (rows, columns), generator=generator)
    picked = special[torch.randint(0, len(special), (rows, columns), generator=generator)]
    return torch.where(which == 0, probes, torch.where(which == 1, small, picked))


def _replay(region: _Region, result: Node, inputs: torch.Tensor) -> torch.Tensor:
    """Run the region on float64 probes that stand for the rows of the projection."""
    values: dict[Node, Any] = {region.linear.node: inputs}
    rows = shape(region.linear.node)[0]
    for node in region.nodes:
        values[node] = _run(node, region, values, rows)
    found: torch.Tensor = values[result]
    return found


def _run(node: Node, region: _Region, values: dict[Node, Any], rows: Any) -> Any:
    if node in region.skipped:
        return values[region.skipped[node]]
    if is_cast(node) or is_copy(node):
        return values[node.args[0]]  # type: ignore[index]
    if getattr(node.target, "__name__", "") == "getitem":
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet in _CONSTANTS:
        sizes = [size if not same(size, rows) else _PROBE_ROWS for size in shape(node)]
        fill = {aten.ones_like: 1.0, aten.zeros_like: 0.0}.get(packet)
        if fill is None:
            fill = node.args[0] if packet is aten.scalar_tensor else node.args[1]
        return torch.full([int(size) for size in sizes], float(fill), dtype=torch.float64)  # type: ignore[arg-type]
    if packet in (aten.reshape, aten.view, aten._unsafe_view, aten.expand):
        sizes = [_PROBE_ROWS, *shape(node)[1:]]
        source = values[node.args[0]]  # type: ignore[index]
        return source.expand(sizes) if packet is aten.expand else source.reshape(sizes)
    args = map_arg(node.args, values.__getitem__)
    kwargs = map_arg({k: v for k, v in node.kwargs.items() if k != "dtype"}, values.__getitem__)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    try:
        return target(*args, **kwargs)
    except (RuntimeError, IndexError) as error:  # shapes that fit at one number of rows only
        raise Unproven(f"{describe(node)} inside the gate function depends on the number of rows ({error})", node) from None


def _candidates(constants: list[float], gated: bool) -> Iterator[GateFunction]:
    """Gate functions whose parameters are among the constants, those without parameters first."""
    for activation in ACTIVATIONS:
        yield GateFunction(activation, gated=gated)
    positive = [c for c in constants if c > 0]
    limits: list[tuple[float | None, bool]] = [(None, False), *((c, after) for c in positive for after in (False, True))]
    offsets = [0.0, *positive, *(-c for c in positive)] if gated else [0.0]
    caps: list[tuple[float | None, float | None]] = [(None, None)]
    caps += itertools.product(positive, positive) if gated else [(c, None) for c in positive]
    for activation in ACTIVATIONS:
        alphas = [1.0, *(c for c in positive if c != 1.0)] if activation == "silu" else [1.0]
        for (gate_cap, up_cap), (limit, after), alpha, offset in itertools.product(caps, limits, alphas, offsets):
            if gate_cap is None or activation == "silu":
                yield GateFunction(activation, alpha, limit, after, offset, gate_cap, up_cap, gated)


def _agrees(gate: GateFunction, layout: str, up_first: bool, inputs: torch.Tensor, outputs: torch.Tensor) -> bool:
    columns = inputs.shape[1]
    if not gate.gated:
        first, second = inputs, None
    elif layout == "concatenated":
        first, second = inputs[:, : columns // 2], inputs[:, columns // 2 :]
    else:
        first, second = inputs[:, ::2], inputs[:, 1::2]
    if up_first and second is not None:
        first, second = second, first
    # One row rejects nearly every wrong candidate.
    for rows in (slice(0, 1), slice(0, 4), slice(None)):
        expected = gate(first[rows], None if second is None else second[rows])
        error = (expected - outputs[rows]).abs()
        if not bool((error <= _TOLERANCE * (expected.abs() + outputs[rows].abs() + 1e-6)).all()):
            return False
    return True
