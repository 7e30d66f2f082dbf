"""The pointwise sub-graph between two projections: which nodes it has, and its value on float64 probes.

Changes of float dtype are left out of the evaluation, so that what is evaluated is the real-valued function. Sentinel
masks and the addition of a bias by expert id are recognised on the way and left out too: they are proven elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import (
    FLOATS,
    Unproven,
    arg,
    aten,
    calls,
    describe,
    dim,
    is_cast,
    is_copy,
    is_float_cast,
    is_getitem,
    rank,
    same,
    same_shape,
    shape,
    source_of,
    tensor,
    without_float_casts,
)
from moe_compile.passes.row_expressions import Clamp, Load, Mask, Rows
from moe_compile.passes.row_provenance import RowProvenance

# Operators whose value at one position depends on the same position of their operands alone. No comparison and no
# `where` is among them: they can change the function at a few points, or for NaN alone, where no probe need fall.
_POINTWISE = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.reciprocal, aten.abs,
    aten.exp, aten.expm1, aten.log1p, aten.sigmoid, aten.tanh, aten.erf, aten.pow, aten.square, aten.sqrt,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.minimum, aten.maximum, aten.hardtanh, aten.softplus,
    aten.relu, aten.relu6, aten.silu, aten.gelu, aten.leaky_relu, aten.elu, aten.mish, aten.hardswish,
}  # fmt: skip
_COMPARISONS = {aten.where, aten.ge, aten.gt, aten.le, aten.lt, aten.eq, aten.ne, aten.isnan, aten.sign}
# Operators that only choose or re-arrange columns; dimension 0 (rows) must stay as it is.
_STRUCTURAL = {
    aten.split, aten.split_with_sizes, aten.chunk, aten.slice, aten.select, aten.unbind, aten.squeeze, aten.unsqueeze,
    aten.reshape, aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.expand,
}  # fmt: skip
_CONSTANTS = {aten.full, aten.scalar_tensor, aten.full_like, aten.ones_like, aten.zeros_like}
_NOT_NUMBERS = ("dtype", "device", "layout", "pin_memory", "memory_format")

_MAX_CONSTANTS = 6


@dataclass(frozen=True)
class Region:
    """Nodes from one projection to ``result``, in graph order.

    ``skipped`` maps bias additions and masks to the operand that they stand for.
    """

    linear: ExpertGemm
    result: Node
    nodes: tuple[Node, ...]
    bias: Rows | None
    masks: tuple[Mask, ...]
    skipped: Mapping[Node, Node]

    @property
    def out_width(self) -> Any:
        return shape(self.result)[-1]

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The sizes between the first dimension and the columns."""
        return tuple(int(size) for size in shape(self.linear.node)[1:-1])

    def operators(self) -> str:
        """The names of the operators, for messages."""
        names = [
            "getitem" if is_getitem(node) else describe(node).removeprefix("aten.").split(".")[0]
            for node in self.nodes
            if not is_cast(node) and node not in self.skipped
        ]
        return ", ".join(dict.fromkeys(names))


def collect(result: Node, gemms: Mapping[Node, ExpertGemm], provenance: RowProvenance) -> Region:
    """Everything between ``result`` and the projection that it comes from.

    Raises:
        Unproven: an operator on the way is not pointwise, or the way starts at no or at several projections.
    """
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
            raise Unproven(
                f"the down projection's input depends on {describe(node)}, which is not the up projection", node
            )
        seen.add(node)
        masked = provenance.masked_source(node)
        bias = None if masked is not None else bias_operand(node, provenance)
        if masked is not None:
            skipped[node], mask = masked
            masks.append(mask)
        elif bias is not None:
            skipped[node], biases[node] = bias
        else:
            _check_allowed(node)
            stack.extend(node.all_input_nodes)
            continue
        stack.append(skipped[node])
    if not found:
        raise Unproven("no expert projection leads to the input of this one", result)
    if len(found) > 1:
        raise Unproven(
            f"{len(found)} projections lead to the down projection's input: separate gate and up weights", result
        )
    ((start, linear),) = found.items()
    for node in biases:
        if not _is_plain(skipped[node], start, skipped):
            raise Unproven("a bias is added after the up projection was changed", node)
    if len(biases) > 1:
        raise Unproven("more than one bias is added to the up projection", next(iter(biases)))
    if not all(isinstance(size, int) for size in shape(start)[1:]):
        raise Unproven(f"the up projection has dynamic sizes {tuple(shape(start))} besides its rows", start)
    order = {node: i for i, node in enumerate(result.graph.nodes)}
    nodes = tuple(sorted(seen, key=order.__getitem__))
    return Region(linear, result, nodes, next(iter(biases.values()), None), tuple(masks), skipped)


def _is_plain(node: Node, start: Node, skipped: Mapping[Node, Node]) -> bool:
    """Whether ``node`` is the projection itself, up to casts, copies and masks."""
    while node is not start:
        source = skipped.get(node) or (source_of(node) if is_float_cast(node) or is_copy(node) else None)
        if source is None:
            return False
        node = source
    return True


def bias_operand(node: Node, provenance: RowProvenance) -> tuple[Node, Rows] | None:
    """``(x, rows of the bias table)`` of ``x + bias[ids]``, with ``bias`` a 2-D graph input."""
    if not calls(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    first, second = arg(node, 0, "self"), arg(node, 1, "other")
    for x, other in ((first, second), (second, first)):
        if not isinstance(x, Node) or not isinstance(other, Node) or not same_shape(shape(x), shape(other)):
            continue
        rows = provenance.rows(without_float_casts(other))
        if isinstance(rows.index, Load | Clamp) and rows.base.op == "placeholder" and rank(rows.base) == 2:
            return x, rows
    return None


def _check_allowed(node: Node) -> None:
    if is_getitem(node) or is_copy(node):
        return
    if is_cast(node):
        if tensor(node).dtype not in FLOATS:
            raise Unproven(f"the gate function converts to {tensor(node).dtype}", node)
        return
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _CONSTANTS:
        return
    if packet in _POINTWISE:
        other = next((source for source in node.all_input_nodes if source.op == "placeholder"), None)
        if other is not None:
            raise Unproven(f"the gate function reads another input of the graph, {other.name}", node)
        return
    if packet in _COMPARISONS:
        raise Unproven(f"{describe(node)} in the gate function compares, so that evaluating it proves nothing", node)
    if packet not in _STRUCTURAL or node.target is aten.view.dtype:
        raise Unproven(f"{describe(node)} between the two projections is not a pointwise operator", node)
    values = node.meta.get("val")
    source = source_of(node)
    rows = shape(source)[0] if rank(source) else None
    if packet in (aten.permute, aten.transpose) and 0 in _moved_dims(node):
        raise Unproven(f"{describe(node)} inside the gate function moves rows", node)
    for one in values if isinstance(values, list | tuple) else [values]:
        if rows is None or not isinstance(one, torch.Tensor) or one.dim() < 2 or not same(one.shape[0], rows):
            raise Unproven(f"{describe(node)} inside the gate function moves rows", node)
        if not all(isinstance(size, int) for size in one.shape[1:]):
            raise Unproven(f"{describe(node)} inside the gate function has dynamic sizes {tuple(one.shape)}", node)


def _moved_dims(node: Node) -> set[int]:
    count = len(shape(node))
    if calls(node, aten.permute):
        return {d for d, source in enumerate(arg(node, 1, "dims")) if d != source % count}
    return {dim(node, 1, "dim0", count), dim(node, 2, "dim1", count)}


def constants(region: Region) -> list[float]:
    """Every number among the arguments, by magnitude: what a limit, an alpha or an offset could be.

    Raises:
        Unproven: there are more than any known gate function has.
    """
    numbers: set[float] = set()
    for node in region.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node in region.skipped or not (packet in _POINTWISE or packet in _CONSTANTS):
            continue
        values = [*node.args, *(v for k, v in node.kwargs.items() if k not in _NOT_NUMBERS)]
        for number in values[1:] if packet is aten.full else values:
            if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e9:
                numbers.add(abs(float(number)))
    if len(numbers) > _MAX_CONSTANTS:
        raise Unproven(f"the gate function has {len(numbers)} constants, more than any known one", region.result)
    return sorted(numbers)


def signature(region: Region) -> Hashable:
    """Equal for two regions that compute the same thing: the layers of a model are searched once."""
    start = region.linear.node
    names: dict[Node, str] = {start: f"in{shape(start)[1:]}"}
    lines = []
    for i, node in enumerate(region.nodes):
        names[node] = f"n{i}"
        if node in region.skipped:
            lines.append(f"n{i}={names[region.skipped[node]]}")
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: names.get(n, "?"))
            sizes = shape(node)[1:] if rank(node) else ()
            lines.append(f"n{i}={node.target}{args}{kwargs}{sizes}")
    return (*lines, names[region.result], str(region.out_width))


def replay(region: Region, inputs: torch.Tensor) -> torch.Tensor:
    """The region's result (n, out_width) on inputs (n, width); n is a multiple of the product of ``inner_sizes``.

    Raises:
        Unproven: an operator does not take another number of rows, or the result has another shape.
    """
    start = inputs.reshape(-1, *region.inner_sizes, inputs.shape[-1])
    values: dict[Node, Any] = {region.linear.node: start}
    rows = shape(region.linear.node)[0]
    for node in region.nodes:
        values[node] = _run(node, region, values, rows, start.shape[0])
    found: torch.Tensor = values[region.result]
    if found.shape != (*start.shape[:-1], region.out_width):
        columns = inputs.shape[-1]
        raise Unproven(f"the gate function turns {columns} columns into {tuple(found.shape[1:])}", region.result)
    return found.reshape(len(inputs), -1)


def _run(node: Node, region: Region, values: Mapping[Node, Any], rows: Any, probe_rows: int) -> Any:
    if node in region.skipped:
        return values[region.skipped[node]]
    source = source_of(node)
    if is_cast(node) or is_copy(node):
        assert source is not None
        return values[source]
    if is_getitem(node):
        assert source is not None
        return values[source][arg(node, 1, "index")]
    target: Any = node.target
    packet = target.overloadpacket
    if packet in _CONSTANTS:
        return _constant(node, rows, probe_rows)
    if packet in (aten.reshape, aten.view, aten._unsafe_view, aten.expand):
        assert source is not None
        sizes = [probe_rows, *shape(node)[1:]]
        return values[source].expand(sizes) if packet is aten.expand else values[source].reshape(sizes)
    args = map_arg(node.args, values.__getitem__)
    kwargs = map_arg({k: v for k, v in node.kwargs.items() if k != "dtype"}, values.__getitem__)
    try:
        return target(*args, **kwargs)
    except (RuntimeError, IndexError) as error:  # shapes that fit at one number of rows only
        raise Unproven(
            f"{describe(node)} inside the gate function depends on the number of rows ({error})", node
        ) from None


def _constant(node: Node, rows: Any, probe_rows: int) -> torch.Tensor:
    packet: Any = getattr(node.target, "overloadpacket", None)
    fill: Any = {aten.ones_like: 1.0, aten.zeros_like: 0.0}.get(packet)
    if fill is None:
        fill = arg(node, 0, "s") if packet is aten.scalar_tensor else arg(node, 1, "fill_value")
    sizes = list(shape(node))
    if len(sizes) > 1 and same(sizes[0], rows):
        sizes[0] = probe_rows
    if not isinstance(fill, int | float) or not all(isinstance(size, int) for size in sizes):
        raise Unproven(f"{describe(node)} inside the gate function is not a constant of static shape", node)
    return torch.full(sizes, float(fill), dtype=torch.float64)
