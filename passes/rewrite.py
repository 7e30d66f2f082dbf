"""Replace one proven block by one expert operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compile import block_errors
from moe_compile.kernels.ops import attributes, operator
from moe_compile.passes.find_experts import MoEMatch
from moe_compile.passes.fx_utils import aten, prims, same, same_shape, shape, static, tensor
from moe_compile.torch_internals import fake_mode_of


def rewrite(graph: Graph, match: MoEMatch, backend: str, activations: str) -> Node:
    """Insert the operator before the block's root, use its result instead, and return what replaced the root.

    The block's own nodes stay for dead-code elimination, as routing values may be used elsewhere.
    """
    spec = match.spec
    with graph.inserting_before(match.root):
        hidden = _as_matrix(graph, match.hidden_states, spec.hidden_size, spec.activation_dtype)
        ids = _as_matrix(graph, match.topk_ids, spec.top_k, tensor(match.topk_ids).dtype)
        weights = _as_matrix(graph, match.topk_weights, spec.top_k, spec.routing_dtype)
        node = graph.call_function(
            operator(backend),
            (hidden, ids, weights, match.gate_up_proj, match.down_proj),
            _keyword_arguments(match, activations),
        )
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr"):
            if key in match.root.meta:
                node.meta[key] = match.root.meta[key]
        _annotate(node)
        result = _in_shape_of(graph, node, match.root)
    match.root.replace_all_uses_with(result)
    for assertion in match.assertions:  # impure: dead-code elimination would keep what they check
        graph.erase_node(assertion)
    return result


def compare_with_original(graph: Graph, match: MoEMatch, replacement: Node) -> None:
    """Keep the original block: both results go through the operator that compares them and passes the second on."""
    with graph.inserting_after(match.root):
        node = graph.call_function(
            block_errors.operator(), (match.root, replacement, match.topk_ids, block_errors.new_block(match.name))
        )
    replacement.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    _annotate(node)


def _keyword_arguments(match: MoEMatch, activations: str) -> dict[str, Any]:
    found = attributes(match.spec, activations)
    if match.gate_up_bias is not None:
        found["gate_up_bias"] = match.gate_up_bias
    if match.down_bias is not None:
        found["down_bias"] = match.down_bias
    return found


def _as_matrix(graph: Graph, node: Node, columns: int, dtype: torch.dtype) -> Node:
    """``node`` as (rows, columns) of a dtype. -1 stands for the number of rows, which may be symbolic."""
    if len(shape(node)) != 2 or not same(shape(node)[1], columns):
        node = graph.call_function(aten.reshape.default, (node, [-1, columns]))
        _annotate(node)
    if tensor(node).dtype != dtype:
        node = graph.call_function(prims.convert_element_type.default, (node, dtype))
        _annotate(node)
    return node


def _in_shape_of(graph: Graph, node: Node, root: Node) -> Node:
    """The operator's (T, H) as the root has it, such as (batch, sequence, H) with at most one symbolic size."""
    if same_shape(shape(node), shape(root)):
        return node
    sizes = [-1 if static(size) is None else size for size in shape(root)]
    reshaped = graph.call_function(aten.reshape.default, (node, sizes))
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
