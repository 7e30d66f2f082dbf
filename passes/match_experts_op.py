"""Expert operators that are in the graph before the pass runs: the model calls them itself, and they stay as they are.

``experts_implementation="moe_rocm"`` and code that calls ``torch.ops.moe_compile.*`` put them there; their backend was
chosen by the caller. They are reported, so that a report counts every expert block that runs MXFP8 kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compile.kernels.ops import NAMESPACE, is_expert_operator
from moe_compile.passes.fx_utils import arg, module_path, shape, source_location, static, tensor
from moe_compile.spec import ExpertSpec, GateFunction

FORM = "experts_operator"


@dataclass(frozen=True)
class ExpertOperator:
    """One call: what it computes, where, and the backend whose operator it is."""

    backend: str
    spec: ExpertSpec
    name: str
    location: str | None
    device: torch.device


def find_operators(graph: Graph) -> list[ExpertOperator]:
    """Every expert operator of a graph, in graph order."""
    return [_describe(node) for node in graph.nodes if is_expert_operator(node.target)]


def _describe(node: Node) -> ExpertOperator:
    hidden, ids, weights = (node.args[i] for i in range(3))
    gate_up, down = (tensor(node.args[i]) for i in (3, 4))
    target: Any = node.target
    defaults = {one.name: one.default_value for one in target._schema.arguments if one.kwarg_only}
    values: dict[str, Any] = {**defaults, **node.kwargs}
    gate = GateFunction(**{one.name: values[one.name] for one in fields(GateFunction)})
    transposed = values["transposed"]
    num_experts, rows, columns = (int(size) for size in down.shape)
    assert isinstance(hidden, Node)
    assert isinstance(ids, Node)
    assert isinstance(weights, Node)
    spec = ExpertSpec(
        num_experts=num_experts,
        hidden_size=columns if transposed else rows,
        intermediate_size=rows if transposed else columns,
        top_k=static(shape(ids)[1]) or 0,
        gate=gate,
        gate_up_layout=values["gate_up_layout"],
        up_first=values["up_first"],
        transposed=transposed,
        has_bias=arg(node, 7, "gate_up_bias") is not None or arg(node, 8, "down_bias") is not None,
        has_expert_map=arg(node, 9, "expert_map") is not None,
        weight_format=weight_format(gate_up.dtype),
        activation_dtype=tensor(hidden).dtype,
        routing_dtype=tensor(weights).dtype,
        out_dtype=tensor(node).dtype,
    )
    backend = str(target).removeprefix(f"{NAMESPACE}.").split("_experts")[0]
    return ExpertOperator(backend, spec, module_path(node), source_location(node), tensor(hidden).device)


def weight_format(dtype: torch.dtype) -> str:
    """``ExpertSpec.weight_format`` of weights of this dtype."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    return names.get(dtype, "mxfp8")
