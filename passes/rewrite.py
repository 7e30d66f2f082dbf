"""Replace one proven block by one expert operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compile.kernels.ops import attributes, operator
from moe_compile.passes.find_experts import MoEMatch
from moe_compile.passes.fx_utils import aten, same_shape, shape, tensor
from moe_compile.torch_internals import fake_mode_of


def rewrite(graph: Graph, match: MoEMatch, backend: str, activations: str) -> Node:
    """Insert the operator before the block's root, use its result instead, and return its node.

    The block's own nodes stay for dead-code elimination, as routing values may be used elsewhere.
    """
    with graph.inserting_before(match.root):
        tokens = shape(match.root)[0]
        spec = match.spec
        hidden = _as_matrix(graph, match.hidden_states, tokens, spec.hidden_size)
        ids = _as_matrix(graph, match.topk_ids, tokens, spec.top_k)
        weights = _as_matrix(graph, match.topk_weights, tokens, spec.top_k)
        node = graph.call_function(
            operator(backend),
            (hidden, ids, weights, match.gate_up_proj, match.down_proj),
            _keyword_arguments(match, activations),
        )
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr"):
            if key in match.root.meta:
                node.meta[key] = match.root.meta[key]
        _annotate(node)
    match.root.replace_all_uses_with(node)
    return node


def _keyword_arguments(match: MoEMatch, activations: str) -> dict[str, Any]:
    found = attributes(match.spec, activations)
    if match.gate_up_bias is not None:
        found["gate_up_bias"] = match.gate_up_bias
    if match.down_bias is not None:
        found["down_bias"] = match.down_bias
    return found


def _as_matrix(graph: Graph, node: Node, rows: Any, columns: int) -> Node:
    """``node`` as (rows, columns). Only its leading dimensions can differ, so -1 stands for a symbolic row count."""
    if same_shape(shape(node), (rows, columns)):
        return node
    reshaped = graph.call_function(aten.reshape.default, (node, [-1, columns]))
    _annotate(reshaped)
    return reshaped


def _annotate(node: Node) -> None:
    """Give a new node the fake tensor that its operator makes, as later passes and Inductor expect."""
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    mode = fake_mode_of([n.meta.get("val") for n in node.all_input_nodes])
    target: Any = node.target
    if mode is None:
        with torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)
        return
    with mode, torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)


def check_output(node: Node, root: Node) -> None:
    """Our own invariant: the operator's result has the root's shape and dtype."""
    assert same_shape(shape(node), shape(root))
    assert tensor(node).dtype == tensor(root).dtype
