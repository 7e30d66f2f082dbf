"""``explain`` and ``refresh``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_modules import E, H, MoE, hidden_states, moe, relative_error
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import moe_compile
from moe_compile import packed_weights, torch_internals
from moe_compile.errors import BackendRefused, PackedWeightsError
from moe_compile.explanation import explain_with
from moe_compile.options import CompileOptions

AOT = CompileOptions(inductor=False)


def explained(model: Any, x: Tensor, **options: Any) -> moe_compile.CompileReport:
    return explain_with(CompileOptions(**{"inductor": False, **options}), model, (x,), {})


class EagerExperts(nn.Module):
    """The data-dependent loop of transformers' eager experts, and the config that says so."""

    class Config:
        _experts_implementation = "eager"

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.moe = moe()

    def forward(self, x: Tensor) -> Tensor:
        experts = self.moe.experts
        weights, ids = torch.softmax(self.moe.router(x).float(), -1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(ids, E).permute(2, 1, 0)
        for expert in mask.sum(dim=(-1, -2)).nonzero():
            slot, token = torch.where(mask[expert[0]])
            rows = experts.gate(nn.functional.linear(x[token], experts.gate_up_proj[expert[0]]))
            rows = nn.functional.linear(rows, experts.down_proj[expert[0]]) * weights[token, slot, None]
            out.index_add_(0, token, rows.to(out.dtype))
        return out


def test_every_block_by_name() -> None:
    report = explained(nn.Sequential(moe(), nn.Linear(H, H, dtype=torch.bfloat16), moe("batched")), hidden_states())
    assert [(layer.name, layer.form) for layer in report.layers] == [
        ("0.experts", "grouped_mm"),
        ("2.experts", "batched_mm"),
    ]
    assert (report.rewritten, report.graphs, report.from_cache, report.notes) == (2, 1, 0, ())
    assert moe_compile.reports()[-1].layers == report.layers


def test_blocks_are_listed_with_warm_caches() -> None:
    x = hidden_states()
    with torch.no_grad():
        torch.compile(moe(), backend="moe_rocm")(x)
        torch.compiler.reset()
        torch.compile(moe(), backend="moe_rocm")(x)
    assert moe_compile.reports()[-1].from_cache == 1
    report = moe_compile.explain(moe(), x)
    assert (report.rewritten, report.from_cache) == (1, 0)


def test_a_compiled_model_is_not_disturbed() -> None:
    model, x = moe(), hidden_states()
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": False})
    with torch.no_grad():
        before = compiled(x)
        report = explained(compiled, x)
        assert report.rewritten == 1
        assert torch.equal(compiled(x), before)
    assert len(moe_compile.reports()) == 2, "one compile of the model and one of explain"
    assert packed_weights.statistics().entries >= 1


@pytest.mark.parametrize("can_isolate", [True, False], ids=["torch >= 2.12", "torch 2.11"])
def test_explaining_often_uses_up_no_recompile_limit(can_isolate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_CAN_ISOLATE", can_isolate and torch_internals._CAN_ISOLATE)
    model, x = moe(), hidden_states()
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        (layer,) = explained(model, x).layers
        assert (layer.name, layer.rewritten) == ("experts", True)
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": False})
    with torch.no_grad():
        compiled(x)
    assert moe_compile.reports()[-1].rewritten == 1


def test_a_model_compiled_in_place() -> None:
    model, x = nn.Sequential(moe(), moe(seed=1)), hidden_states()
    compiled_graphs = CompileCounter()
    model.compile(backend=compiled_graphs)
    model[1].compile(backend=compiled_graphs)
    with torch.no_grad():
        before = model(x)
        assert explained(model, x).rewritten == 2
        assert torch.equal(model(x), before)
    assert compiled_graphs.frame_count == 1


def test_graph_breaks_are_noted() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = moe()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            torch._dynamo.graph_break()
            out: Tensor = self.moe(x)
            return out

    report = explained(Breaks(), hidden_states())
    assert (report.rewritten, report.graphs) == (1, 2)
    (note,) = report.notes
    assert note.startswith("1 graph break left 2 graphs of the model: ")
    assert explained(moe(), hidden_states()).notes == (), "another model's breaks are not this one's"


def test_an_eager_loop_says_what_to_load_instead() -> None:
    model, x = EagerExperts(), hidden_states()
    report = explained(model, x)
    assert report.rewritten == 0
    breaks, advice = report.notes
    assert "graph breaks left 3 graphs of the model" in breaks
    assert "grouped_mm" in advice


def test_gradients_are_off_so_the_blocks_are_rewritten() -> None:
    model, x = moe(), hidden_states()
    assert torch.is_grad_enabled()
    assert explained(model, x).rewritten == 1
    assert torch.is_grad_enabled()


def test_caches_are_on_again_afterwards() -> None:
    explained(moe(), hidden_states())
    assert not torch.compiler.config.force_disable_caches


def test_keyword_arguments_and_functions() -> None:
    model = moe()

    def run(*, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    assert explain_with(AOT, run, (), {"x": hidden_states()}).rewritten == 1


def test_refusals_are_raised() -> None:
    with pytest.raises(BackendRefused, match="needs gfx950"):
        explained(moe(), hidden_states(), moe_backend="aiter")


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPILE_INDUCTOR", "0")
    monkeypatch.setenv("MOE_COMPILE_MAX_REWRITES", "0")
    report = moe_compile.explain(moe(), hidden_states())
    assert [layer.reason for layer in report.layers] == ["max_rewrites=0"]


def test_an_error_of_the_model_is_the_models_own() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        explained(Fails(), hidden_states())


class TestRefresh:
    def test_after_an_edit_through_data(self) -> None:
        model, x = moe(), hidden_states()
        compiled = torch.compile(model, backend="moe_rocm", options={"inductor": False})
        with torch.no_grad():
            before = compiled(x)
            model.experts.down_proj.data.neg_()
            assert torch.equal(compiled(x), before)
            assert moe_compile.refresh(model) == 1
            assert relative_error(compiled(x), -before) < 1e-6

    def test_of_a_compiled_model_and_of_one_without_packs(self) -> None:
        model: MoE = moe()
        assert moe_compile.refresh(model) == 0
        compiled: Any = torch.compile(model, backend="moe_rocm", options={"inductor": False})
        with torch.no_grad():
            compiled(hidden_states())
        assert moe_compile.refresh(compiled) == 1

    def test_of_part_of_a_block(self) -> None:
        model = moe()
        with torch.no_grad():
            torch.compile(model, backend="moe_rocm", options={"inductor": False})(hidden_states())
        half = nn.ParameterList([model.experts.down_proj])
        with pytest.raises(PackedWeightsError, match=r"\(4, 64, 64\).*pass the whole model"):
            moe_compile.refresh(half)
