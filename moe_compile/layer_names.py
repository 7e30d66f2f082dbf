"""Names of expert blocks behind a graph break, where a graph knows only the module whose forward Dynamo entered.

One such graph can also serve several layers of a model. Which, its parameters tell: they are the graph's arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_compile.report import LayerReport

BREAK_INSIDE = "a graph break inside of the experts leaves their parts in different graphs"


def owners(model: object) -> dict[int, str]:
    """The path of the module that owns each parameter, by the parameter's ``id``; of a shared one the first."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}


def used_modules(args: Sequence[Any], owner: Mapping[int, str]) -> frozenset[tuple[str, bool]]:
    """The modules whose parameters are arguments of a graph, each with whether one is a stack of matrices."""
    found: dict[str, bool] = {}
    for value in args:
        path = owner.get(id(value)) if isinstance(value, torch.nn.Parameter) else None
        if path is not None:
            found[path] = found.get(path, False) or value.dim() == 3
    return frozenset(found.items())


def named(layer: LayerReport, used: Iterable[tuple[str, bool]]) -> LayerReport:
    """The block with its path in the whole model, if the parameters of a run leave one choice."""
    used = list(used)
    paths = {path for path, _ in used}
    if layer.name in paths:
        return layer
    parents = {prefix for path in paths for prefix in _prefixes(path)}
    choices = {path for path in parents if path.endswith(f".{layer.name}")}
    if not choices and "." not in layer.name:  # no module's name, but that of a node
        choices = {path for path, stacked in used if stacked}
    return replace(layer, name=choices.pop()) if len(choices) == 1 else layer


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


@dataclass(frozen=True)
class GraphBlocks:
    """The blocks of one graph. ``frame`` identifies its function, ``broken_at`` is the graph break that ended it."""

    layers: tuple[LayerReport, ...]
    frame: object
    broken_at: str | None


def joined(graphs: Sequence[GraphBlocks]) -> tuple[LayerReport, ...]:
    """All blocks, in order; of one that a graph break has cut, the first part alone, which says so."""
    parts: dict[str, list[tuple[GraphBlocks, LayerReport]]] = {}
    for graph in graphs:
        for layer in graph.layers:
            parts.setdefault(layer.name, []).append((graph, layer))
    result = []
    for found in parts.values():
        place = _cut_at(found)
        layers = [layer for _, layer in found]
        result += [replace(layers[0], reason=BREAK_INSIDE, node=None, location=place)] if place else layers
    return tuple(dict.fromkeys(result))


def _cut_at(parts: Sequence[tuple[GraphBlocks, LayerReport]]) -> str | None:
    """Where the parts of one block were cut from each other; None if they are whole, or one whole block seen again."""
    functions = {graph.frame for graph, _ in parts}  # what follows a break is a function of its own
    different = {(layer.reason, layer.location) for _, layer in parts}
    if any(layer.rewritten for _, layer in parts) or len(functions) < 2 or len(different) < 2:
        return None
    return parts[0][0].broken_at
