"""One expert block before and after the pass: its nodes, and the difference as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from moe_compile.dump_code import node_lines, shape_text
from moe_compile.kernels.ops import is_expert_operator
from moe_compile.passes.fx_utils import describe


@dataclass(frozen=True)
class BlockNode:
    """``operator`` is ``input`` for what a block takes from the rest of the graph. ``inputs`` are names of nodes."""

    name: str
    operator: str
    shape: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class DumpedBlock:
    """``name`` is the module path, ``outcome`` what happened; ``before`` and ``after`` are in graph order."""

    name: str
    form: str
    outcome: str
    location: str | None
    before: tuple[BlockNode, ...]
    after: tuple[BlockNode, ...]
    lines_before: tuple[str, ...]
    lines_after: tuple[str, ...]

    @property
    def diff(self) -> str:
        """Unified, a line for each node."""
        lines = difflib.unified_diff(
            self.lines_before, self.lines_after, "aten_before.py", "aten_after.py", lineterm="", n=3
        )
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class FoundBlock:
    """What the pass found: the nodes' names in the graph before. ``root`` is None for a near miss at ``node``."""

    name: str
    form: str
    location: str | None
    node: str
    root: str | None


def rewritten_blocks(
    before: Graph, after: Graph, found: Sequence[FoundBlock], outcomes: Sequence[str]
) -> list[DumpedBlock]:
    """The blocks that were rewritten. ``outcomes`` has a backend's name for each of ``found``, or an empty string."""
    names_before, names_after = {node.name for node in before.nodes}, {node.name for node in after.nodes}
    by_name = {node.name: node for node in before.nodes}
    gone, new = names_before - names_after, names_after - names_before
    operators = [node for node in after.nodes if node.name in new and is_expert_operator(node.target)]
    done = [(one, outcome) for one, outcome in zip(found, outcomes, strict=True) if outcome and one.root]
    roots = {one.root for one, _ in done}
    blocks = []
    for (one, outcome), operator in zip(done, operators, strict=True):
        assert one.root is not None
        old = _upstream(before, by_name[one.root], gone, roots - {one.root})
        fresh = _neighbours(after, operator, new)
        blocks.append(
            DumpedBlock(
                name=one.name,
                form=one.form,
                outcome=outcome,
                location=one.location,
                before=_described(before, old),
                after=_described(after, fresh),
                lines_before=tuple(node_lines(before, old)),
                lines_after=tuple(node_lines(after, fresh)),
            )
        )
    return blocks


def _upstream(graph: Graph, root: Node, gone: set[str], other_roots: set[str | None]) -> list[Node]:
    """The nodes that the rewrite removed with ``root``, in graph order."""
    seen, stack = {root}, [root]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in seen and node.name in gone and node.name not in other_roots:
                seen.add(node)
                stack.append(node)
    return [node for node in graph.nodes if node in seen]


def _neighbours(graph: Graph, operator: Node, new: set[str]) -> list[Node]:
    """The operator with the casts and reshapes that the rewrite put around it, in graph order."""
    seen, stack = {operator}, [operator]
    while stack:
        node = stack.pop()
        for other in (*node.all_input_nodes, *node.users):
            if other not in seen and other.name in new and not is_expert_operator(other.target):
                seen.add(other)
                stack.append(other)
    return [node for node in graph.nodes if node in seen]


def _described(graph: Graph, nodes: Sequence[Node]) -> tuple[BlockNode, ...]:
    inside = set(nodes)
    outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [BlockNode(n.name, "input", shape_text(n), ()) for n in sorted(outside, key=order.__getitem__)]
    return (*inputs, *(BlockNode(n.name, describe(n), shape_text(n), _names(n.all_input_nodes)) for n in nodes))


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.name for node in nodes))
