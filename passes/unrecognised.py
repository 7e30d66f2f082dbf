"""Experts in a spelling that no matcher takes: not rewritten, but reported, so that their absence is no surprise.

Two signs are unmistakable in a graph: one matrix for each token gathered from a stack of matrices by index, and several
matrices taken from one stack one by one, both on their way into a product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from torch.fx import Graph, Node

from moe_compile.passes.fx_utils import (
    arg,
    aten,
    calls,
    is_cast,
    is_copy,
    is_float,
    is_reshape,
    module_path,
    rank,
    source_location,
    source_of,
)
from moe_compile.passes.near_misses import NearMiss

GATHERED = "expert weights are gathered by index, but used in a product of a form that is not recognised"
LOOP = "a loop over experts: those of one stacked weight are used one by one, a form that this version does not rewrite"
_PRODUCTS = (aten.bmm, aten.mm, aten.addmm, aten.baddbmm, aten.mul.Tensor, aten._grouped_mm)


def unrecognised(graph: Graph, static_inputs: Container[Node] | None, known: Container[Node]) -> dict[Node, NearMiss]:
    """Near misses by node, one for each module and kind.

    Args:
        graph: as for ``find_experts``.
        static_inputs: placeholders that hold parameters or buffers; None if unknown.
        known: placeholders that a match or another near miss accounts for.
    """
    found: dict[Node, NearMiss] = {}
    modules: set[tuple[str, str]] = set()
    for weight in graph.nodes:
        if weight.op != "placeholder" or weight in known or not is_float(weight) or rank(weight) != 3:
            continue
        if static_inputs is not None and weight not in static_inputs:
            continue
        taken: defaultdict[str, list[Node]] = defaultdict(list)
        for user in weight.users:
            if _gathers(user) and _multiplies(user):
                taken[GATHERED].append(user)
            elif calls(user, aten.select) and arg(user, 1, "dim") == 0 and _multiplies(user):
                taken[LOOP].append(user)
        for reason, nodes in taken.items():
            if reason is LOOP and len(nodes) < 2:
                continue
            first = nodes[0]
            where = (module_path(first) if first.meta.get("nn_module_stack") else "", reason)
            if where in modules:  # the other projection of the same module
                continue
            modules.add(where)
            form = "gathered" if reason is GATHERED else "loop"
            found[first] = NearMiss(form, reason, first, module_path(first), source_location(first))
    return found


def weights_behind(node: Node) -> set[Node]:
    """The stacked weights that a candidate reads directly, or behind a gather, a transposition or a cast."""
    found, stack = set(), [(node, 6)]
    while stack:
        current, depth = stack.pop()
        for source in current.all_input_nodes:
            if source.op == "placeholder" and rank(source) == 3:
                found.add(source)
            elif depth and rank(source) in (3, 4):
                stack.append((source, depth - 1))
    return found


def _gathers(node: Node) -> bool:
    if calls(node, aten.index.Tensor):
        indices = arg(node, 1, "indices")
        return len(indices) == 1 and isinstance(indices[0], Node) and not is_float(indices[0])
    return calls(node, aten.index_select) and arg(node, 1, "dim") == 0


def _multiplies(node: Node, depth: int = 8) -> bool:
    """Whether a product takes ``node``, behind casts, copies and changes of shape."""
    for user in node.users:
        if calls(user, *_PRODUCTS):
            return True
        passes_on = is_reshape(user) or is_cast(user) or is_copy(user)
        passes_on = passes_on or calls(user, aten.permute, aten.transpose, aten.t, aten.expand)
        if passes_on and source_of(user) is node and depth and _multiplies(user, depth - 1):
            return True
    return False
