"""Edit a captured graph by hand: the ways in which an expert block can be almost one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graph_capture import Captured
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def annotate(node: Node) -> None:
    """Give a node the fake tensor that its operator makes."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = next(n.meta["val"].fake_mode for n in node.graph.nodes if n.op == "placeholder")
    with mode, torch.no_grad(), enable_python_dispatcher():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def finish(captured: Captured, changed: Node | None = None) -> Captured:
    """Recompute the fake tensors from ``changed`` on, and the code."""
    started = changed is None
    for node in captured.graph.nodes:
        started |= node is changed
        if started and node.op == "call_function":
            annotate(node)
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    captured.module.recompile()
    return captured


def insert_after(captured: Captured, node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """Let every user of ``node`` read ``target(node, *args)`` instead."""
    with captured.graph.inserting_after(node):
        new = captured.graph.call_function(target, (node, *args), kwargs)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return finish(captured, new)


def set_argument(captured: Captured, node: Node, index: int, value: Any) -> Captured:
    args = list(node.args)
    args[index] = value
    node.args = tuple(args)
    return finish(captured, node)


def also_return(captured: Captured, node: Node) -> Captured:
    output = next(n for n in captured.graph.nodes if n.op == "output")
    found = output.args[0]
    output.args = ((*found, node) if isinstance(found, list | tuple) else (found, node),)
    return finish(captured)
