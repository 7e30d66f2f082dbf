"""``MoEFusionPass`` on captured graphs: what it rewrites, what it refuses, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import Experts, Spelling, random_inputs
from graph_capture import Captured, capture, run
from torch import Tensor

from moe_compile.errors import RewriteRefused
from moe_compile.kernels.ops import is_expert_operator
from moe_compile.options import CompileOptions
from moe_compile.passes.fusion_pass import GRADIENTS, MoEFusionPass, package_digest
from moe_compile.torch_internals import CustomGraphPass


class Layers(torch.nn.Module):
    def __init__(self, *gates: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Experts(Spelling(gate=gate), dtype=torch.float32) for gate in gates])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, ids, weights)
        return x


def captured_layers(*gates: str) -> Captured:
    layers = Layers(*gates)
    return capture(layers, list(random_inputs(layers.layers[0])))  # type: ignore[arg-type]


def make_pass(**options: Any) -> MoEFusionPass:
    return MoEFusionPass(CompileOptions.parse({"moe_backend": "reference", **options}))


def count(captured: Captured) -> int:
    return sum(is_expert_operator(node.target) for node in captured.graph.nodes)


def test_every_block_is_rewritten_and_reported() -> None:
    captured = captured_layers("silu", "swiglu_oai")
    expected = run(captured)[0]
    report = make_pass().apply(captured.graph, True, captured.static_inputs)
    captured.module.recompile()
    assert (report.rewritten, report.skipped, count(captured)) == (2, 0, 2)
    assert [layer.moe_backend for layer in report.layers] == ["reference", "reference"]
    torch.testing.assert_close(run(captured)[0], expected, rtol=1e-4, atol=1e-4)


def test_max_rewrites_takes_the_first() -> None:
    captured = captured_layers("silu", "silu", "silu")
    report = make_pass(max_rewrites=1).apply(captured.graph, True, captured.static_inputs)
    assert (report.rewritten, report.skipped, count(captured)) == (1, 2, 1)
    assert report.layers[1].reason == "max_rewrites=1"
    assert report.layers[0].moe_backend == "reference"


def test_a_training_graph_is_left_alone() -> None:
    captured = captured_layers("silu")
    report = make_pass().apply(captured.graph, False, captured.static_inputs)
    assert (report.rewritten, count(captured)) == (0, 0)
    assert report.layers[0].reason == GRADIENTS


def test_strict_names_every_block_that_was_left_alone() -> None:
    captured = captured_layers("silu", "silu")
    for node in captured.nodes(torch.ops.aten.silu):
        node.target = torch.ops.aten.mish.default
    with pytest.raises(RewriteRefused, match="strict=True, and 2 expert blocks were not rewritten") as refused:
        make_pass(strict=True).apply(captured.graph, True, captured.static_inputs)
    assert str(refused.value).count("the gate function is none of the known ones") == 2


def test_strict_is_content_with_a_graph_that_is_all_rewritten() -> None:
    captured = captured_layers("silu")
    assert make_pass(strict=True).apply(captured.graph, True, captured.static_inputs).rewritten == 1


def test_a_graph_without_experts_is_not_touched() -> None:
    captured = capture(torch.nn.Linear(4, 4), [torch.randn(2, 4)])
    before = str(captured.graph)
    report = make_pass().apply(captured.graph, True, captured.static_inputs)
    assert (report.layers, str(captured.graph)) == ((), before)


def test_a_users_pass_runs_first() -> None:
    captured = captured_layers("silu")
    seen = []

    def users(graph: torch.fx.Graph) -> None:
        seen.append(count(captured))

    fusion = MoEFusionPass(CompileOptions.parse({"moe_backend": "reference"}), [users])
    fusion(captured.graph, True)
    assert seen == [0]
    assert count(captured) == 1
    assert len(fusion.reports) == 1


class Users(CustomGraphPass):
    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str | None:
        return self._uuid


def test_uuid_covers_options_and_users_passes() -> None:
    def uuid(*users: Any, **options: Any) -> Any:
        return MoEFusionPass(CompileOptions.parse({"moe_backend": "reference", **options}), users).uuid()

    assert uuid() == uuid()
    assert len({uuid(), uuid(max_rewrites=1), uuid(Users("a")), uuid(Users("b")), uuid(Users("a"), Users("b"))}) == 5
    assert uuid(Users(None)) is None
    assert uuid(lambda graph: None) is None  # nothing says what it does: nothing is cached


def test_package_digest_is_one_per_process() -> None:
    assert package_digest() == package_digest()
    assert len(package_digest()) == 64
