"""A layered drawing of one block: nodes in rows from inputs to output, long edges through the rows between.

The usual three steps (Sugiyama, Tagawa, Toda 1981): a row for each node by its longest path, an order in each row by
the mean position of neighbours, then positions that pull each node towards its neighbours without overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_compile.dump_blocks import BlockNode

BOX_HEIGHT, ROW_HEIGHT, GAP, CHARACTER, PADDING = 40, 74, 18, 7.3, 22
_SWEEPS = 12


@dataclass(frozen=True)
class Box:
    """``x`` is the middle, ``y`` the top edge."""

    node: BlockNode
    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Drawing:
    """``edges`` are the points that a line goes through, from the bottom of one box to the top of another."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


@dataclass(eq=False)
class _Slot:
    """A place in a row: a node's, or a bend of a long edge (``node`` is None)."""

    row: int
    width: float
    node: BlockNode | None = None
    x: float = 0.0


def draw(nodes: Sequence[BlockNode], labels: Sequence[tuple[str, str]]) -> Drawing:
    """Place the nodes; ``nodes`` are in topological order, ``labels`` are the two lines of text in each box."""
    rows_of = _rows(nodes)
    slots = {
        node.name: _Slot(rows_of[node.name], max(map(len, label)) * CHARACTER + PADDING, node)
        for node, label in zip(nodes, labels, strict=True)
    }
    everything = list(slots.values())
    chains: list[list[_Slot]] = []
    for node in nodes:
        for source in node.inputs:
            if source not in slots:
                continue
            start, end = slots[source], slots[node.name]
            bends = [_Slot(row, 8.0) for row in range(start.row + 1, end.row)]
            everything += bends
            chains.append([start, *bends, end])
    above: dict[_Slot, list[_Slot]] = {slot: [] for slot in everything}
    below: dict[_Slot, list[_Slot]] = {slot: [] for slot in everything}
    for chain in chains:
        for upper, lower in zip(chain, chain[1:], strict=False):
            below[upper].append(lower)
            above[lower].append(upper)
    rows = [[slot for slot in everything if slot.row == row] for row in range(max(rows_of.values(), default=-1) + 1)]
    for row in rows:
        _pack(row)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            _arrange(row, above if down else below, reorder=sweep < _SWEEPS - 4)
    left = min((slot.x - slot.width / 2 for slot in everything), default=0.0) - GAP
    right = max((slot.x + slot.width / 2 for slot in everything), default=0.0) + GAP
    boxes = tuple(
        Box(node, slots[node.name].x - left, _top(slots[node.name]), slots[node.name].width) for node in nodes
    )
    return Drawing(
        boxes=boxes,
        edges=tuple(_points(chain, left) for chain in chains),
        width=right - left,
        height=len(rows) * ROW_HEIGHT + GAP,
    )


def _rows(nodes: Sequence[BlockNode]) -> dict[str, int]:
    """The longest path to each node; inputs, and what is made of one input alone, stand just above their first user."""
    rows: dict[str, int] = {node.name: 0 for node in nodes}
    for node in nodes:
        rows[node.name] = max((rows[source] + 1 for source in node.inputs if source in rows), default=0)
    inputs = {node.name for node in nodes if not any(source in rows for source in node.inputs)}
    for node in reversed(nodes):
        if node.name in inputs or (len(node.inputs) == 1 and node.inputs[0] in inputs):
            users = [rows[user.name] for user in nodes if node.name in user.inputs]
            rows[node.name] = max(0, min(users, default=1) - 1)
    return rows


def _pack(row: list[_Slot]) -> None:
    x = 0.0
    for slot in row:
        slot.x = x + slot.width / 2
        x += slot.width + GAP


def _arrange(row: list[_Slot], neighbours: dict[_Slot, list[_Slot]], reorder: bool) -> None:
    """Move every slot towards the mean of its neighbours, then apart until nothing overlaps."""
    wanted = {slot: _mean([other.x for other in neighbours[slot]], slot.x) for slot in row}
    if reorder:
        row.sort(key=wanted.__getitem__)
    for slot in row:
        slot.x = wanted[slot]
    for first, second in zip(row, row[1:], strict=False):
        second.x = max(second.x, first.x + (first.width + second.width) / 2 + GAP)
    # Pushed to the right only; take the mean displacement back, so that rows stay in the middle.
    shift = _mean([slot.x - wanted[slot] for slot in row], 0.0)
    for slot in row:
        slot.x -= shift


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _top(slot: _Slot) -> float:
    return GAP / 2 + slot.row * ROW_HEIGHT


def _points(chain: Sequence[_Slot], left: float) -> tuple[tuple[float, float], ...]:
    start, *bends, end = chain
    points = [(start.x - left, _top(start) + BOX_HEIGHT)]
    for bend in bends:
        points += [(bend.x - left, _top(bend)), (bend.x - left, _top(bend) + BOX_HEIGHT)]
    return (*points, (end.x - left, _top(end)))
