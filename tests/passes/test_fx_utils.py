"""Small questions about nodes."""

from __future__ import annotations

import pytest
import torch
from graph_capture import capture
from torch.fx import Graph, Node

from moe_compile.passes import fx_utils
from moe_compile.passes.fx_utils import Unproven, module_path, source_location

aten = torch.ops.aten


def _last(function: object, *inputs: torch.Tensor) -> Node:
    captured = capture(function, list(inputs))  # type: ignore[arg-type]
    (output,) = (node for node in captured.graph.nodes if node.op == "output")
    found = output.args[0]
    first: Node = found[0] if isinstance(found, list | tuple) else found
    return first


def test_a_value_of_unknown_shape_is_unproven() -> None:
    node = Graph().placeholder("x")
    with pytest.raises(Unproven, match="placeholder x is not a tensor of known shape"):
        fx_utils.shape(node)


def test_reinterpreted_bits_are_no_reshape() -> None:
    x = torch.zeros(4, dtype=torch.int64)
    assert fx_utils.is_reshape(_last(lambda x: x.view(2, 2), x))
    assert not fx_utils.is_reshape(_last(lambda x: x.view(torch.float64), x))


def test_casts_by_kind() -> None:
    to_bf16 = _last(lambda x: x.bfloat16(), torch.zeros(4))
    to_fp8 = _last(lambda x: x.to(torch.float8_e4m3fn), torch.zeros(4))
    to_int = _last(lambda x: x.int(), torch.zeros(4, dtype=torch.int64))
    to_byte = _last(lambda x: x.to(torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert [fx_utils.is_float_cast(n) for n in (to_bf16, to_fp8, to_int, to_byte)] == [True, False, False, False]
    assert [fx_utils.is_index_cast(n) for n in (to_bf16, to_fp8, to_int, to_byte)] == [False, False, True, False]
    assert all(fx_utils.is_cast(n) for n in (to_bf16, to_fp8, to_int, to_byte))


def test_a_copy_to_another_device_is_no_cast() -> None:
    node = _last(lambda x: x.to(torch.float64), torch.zeros(4))
    node.kwargs = {**node.kwargs, "device": torch.device("meta")}
    assert not fx_utils.is_cast(node)


@pytest.mark.parametrize(
    ("function", "zero"),
    [
        (lambda x: torch.zeros(4), True),
        (lambda x: torch.zeros_like(x), True),
        (lambda x: x.new_zeros(4), True),
        (lambda x: torch.full((4,), 0.0), True),
        (lambda x: torch.full_like(x, 0), True),
        (lambda x: torch.zeros(1).expand(4), True),
        (lambda x: torch.full((4,), 1e-9), False),
        (lambda x: torch.ones(4), False),
        (lambda x: torch.empty(4), False),
        (lambda x: x * 0, False),
    ],
)
def test_zeros(function: object, zero: bool) -> None:
    assert fx_utils.is_zero(_last(function, torch.ones(4))) == zero


def test_sizes_are_not_values() -> None:
    captured = capture(lambda x: (x.relu(), torch.zeros_like(x)), [torch.ones(4)])
    assert [user.target for user in fx_utils.value_users(captured.placeholders[0])] == [aten.relu.default]


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ("L['self'].model.layers[3].mlp.experts", "model.layers[3].mlp.experts"),
        ("L['self']._modules['model']._modules['layers']._modules['3']", "model.layers.3"),
        ("_orig_mod.model", "model"),
    ],
)
def test_module_path(stack: str, name: str) -> None:
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": ("", object), "b": (stack, object)}
    assert module_path(node) == name


def test_module_path_without_modules_is_the_node() -> None:
    assert module_path(Graph().placeholder("x")) == "x"


def test_source_location_is_the_innermost_line_of_model_code() -> None:
    node = Graph().placeholder("x")
    node.meta["stack_trace"] = "\n".join(
        [
            '  File "/models/modeling_tiny.py", line 12, in forward\n    x = self.experts(x)',
            '  File "/site-packages/transformers/integrations/moe.py", line 3, in experts_forward\n    y = mm(x)',
            '  File "/site-packages/torch/nn/functional.py", line 9, in silu\n    return silu(x)',
        ]
    )
    assert source_location(node) == "modeling_tiny.py:12 in forward: x = self.experts(x)"
    assert source_location(Graph().placeholder("x")) is None
