"""``torch.compile(..., backend="moe_rocm")``: results, refusals, grad modes, changes of weights, threads.

Most tests run with ``inductor=False``: the pass and the operators are the same, and a compile takes 0.1 s.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_modules import E, H, I, K, hidden_states, moe, relative_error, with_mxfp8_weights
from torch import Tensor, nn

import moe_compile
from moe_compile import packed_weights
from moe_compile.errors import BackendRefused, OptionError, RewriteRefused
from moe_compile.kernels import ops
from moe_compile.passes import fusion_pass
from moe_compile.passes.fusion_pass import GRADIENTS
from moe_compile.target import Capabilities, Package, Target

AOT: dict[str, Any] = {"inductor": False}
# bf16 sums in another order than the yardstick's; MXFP8 itself moves the result by 0.03 and more.
CLOSE = 8e-3


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    packed_weights.clear()
    yield
    packed_weights.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of the reference kernel."""
    seen: list[int] = []
    run = ops.reference.experts

    def counting(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.shape[0])
        out: Tensor = run(hidden, *args, **kwargs)
        return out

    monkeypatch.setattr(ops.reference, "experts", counting)
    return seen


def compiled_with(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="moe_rocm", options={**AOT, **options})


def only_report() -> moe_compile.CompileReport:
    (found,) = moe_compile.reports()
    return found


class TestRewritten:
    @pytest.mark.parametrize("inductor", [True, False])
    @pytest.mark.parametrize("spelling", ["grouped", "batched"])
    def test_computes_what_mxfp8_weights_would(self, spelling: str, inductor: bool, calls: list[int]) -> None:
        model, x = moe(spelling), hidden_states()
        compiled = compiled_with(model, inductor=inductor)
        with torch.no_grad():
            out = compiled(x)
            assert relative_error(out, with_mxfp8_weights(model)(x)) < CLOSE
            assert relative_error(out, model(x)) > 0.02, "this is not MXFP8"
            assert torch.equal(compiled(x), out)
        assert calls == [len(x)] * 2
        (layer,) = only_report().layers
        assert (layer.moe_backend, layer.name, layer.form) == ("reference", "experts", f"{spelling}_mm")

    def test_any_number_of_tokens_packs_once(self, calls: list[int]) -> None:
        model = moe()
        compiled = compiled_with(model)
        yardstick = with_mxfp8_weights(model)
        counts = [16, 17, 33, 1, 2, 0, 5]
        with torch.no_grad():
            for tokens in counts:
                x = hidden_states(tokens)
                out = compiled(x)
                assert out.shape == x.shape
                if tokens:
                    assert relative_error(out, yardstick(x)) < CLOSE
        assert calls == counts
        assert len(moe_compile.reports()) <= 4
        assert all(report.rewritten == 1 for report in moe_compile.reports())
        assert packed_weights.statistics().entries == 1

    def test_prefill_and_decode_spellings_share_one_pack(self, calls: list[int]) -> None:
        """transformers' generate() switches one model from grouped to batched after the prefill."""
        model = moe()
        compiled = compiled_with(model)
        with torch.no_grad():
            for spelling, tokens in (("grouped", 8), ("batched", 1), ("grouped", 8)):
                model.experts.spelling = spelling
                compiled(hidden_states(tokens))
        assert calls == [8, 1, 8]
        assert [report.layers[0].form for report in moe_compile.reports()] == ["grouped_mm", "batched_mm"]
        assert packed_weights.statistics().entries == 1

    def test_max_rewrites(self) -> None:
        model = nn.Sequential(moe(), moe(seed=1))
        with torch.no_grad():
            compiled_with(model, max_rewrites=1)(hidden_states())
        first, second = only_report().layers
        assert (first.name, first.moe_backend) == ("0.experts", "reference")
        assert (second.name, second.reason) == ("1.experts", "max_rewrites=1")

    def test_mode_is_taken_and_reaches_the_options(self, calls: list[int]) -> None:
        model, x = moe(), hidden_states()
        with torch.no_grad():
            torch.compile(model, backend="moe_rocm", mode="reduce-overhead")(x)
        assert calls == [len(x)]

    def test_one_line_of_log_a_compile(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="moe_compile")
        with torch.no_grad():
            compiled_with(moe())(hidden_states())
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        assert lines == ["moe_rocm: 1/1 expert blocks -> reference"]

    def test_reports_are_in_the_order_of_compiles(self) -> None:
        with torch.no_grad():
            for spelling in ("batched", "grouped"):
                compiled_with(nn.Sequential(moe(spelling)))(hidden_states())
        assert [report.layers[0].form for report in moe_compile.reports()] == ["batched_mm", "grouped_mm"]

    def test_a_model_without_experts(self) -> None:
        model, x = nn.Linear(H, H), hidden_states(dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(compiled_with(model)(x), model(x))
        assert only_report().summary() == "no expert blocks found"


def test_a_faster_backend_that_is_not_installed_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fusion_pass._warn_once.cache_clear()
    missing = Capabilities(triton=Package(problem="triton is not installed (pip install triton)"))
    monkeypatch.setattr(Capabilities, "detect", classmethod(lambda cls: missing))
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: Target("cuda", "sm_90")))
    with torch.no_grad():
        for seed in (0, 1):
            torch.compiler.reset()
            compiled_with(moe(seed=seed))(hidden_states())
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "moe_rocm" in r.getMessage()]
    assert warnings == [
        "moe_rocm: reference runs the experts; a faster backend is missing: "
        "triton: triton is not installed (pip install triton)"
    ]


class Breaks(nn.Module):
    """Three graphs: before the break, the experts, and after the second break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(H, H, dtype=torch.bfloat16)
        self.moe = moe()
        self.ran: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        self.ran.append("first")
        out: Tensor = self.moe(x)
        return out


class TestRefused:
    @pytest.mark.parametrize("inductor", [True, False])
    @pytest.mark.parametrize(
        ("moe_backend", "reasons"),
        [
            ("aiter", ["needs gfx950", "this is cpu", "aiter"]),
            ("flydsl", ["needs gfx950", "this is cpu", "flydsl"]),
            ("triton_native", ["block-scaled matrix instructions", "this is cpu"]),
            ("triton", ["needs a CUDA or ROCm GPU, this is cpu"]),
        ],
    )
    def test_a_backend_that_cannot_run_here(
        self, moe_backend: str, reasons: list[str], inductor: bool, calls: list[int]
    ) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model, moe_backend=moe_backend, inductor=inductor)
        available = {one.name: one for one in moe_compile.available_backends(device=torch.device("cpu"))}
        with torch.no_grad():
            with pytest.raises(ValueError, match=moe_backend) as caught:
                compiled(x)
            assert isinstance(caught.value, BackendRefused)
            for reason in (*reasons, *(r.reason for r in available[moe_backend].rejections)):
                assert reason in str(caught.value)
            assert caught.value.__cause__ is None
            assert calls == []
            assert torch.equal(model(x), moe()(x)), "the model itself must still run"
            torch.compile(model, backend="moe_rocm", options={"inductor": inductor})(x)
            assert calls == [len(x)]
            with pytest.raises(BackendRefused):
                compiled(x)

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"moe_backnd": "auto"}, ["moe_backnd", "moe_backend", "activations", "Did you mean 'moe_backend'"]),
            ({"moe_backend": "tritn"}, ["tritn", "triton_native", "reference", "Did you mean 'triton'"]),
            ({"activations": "fp4"}, ["activations='fp4'", "bf16", "mxfp8"]),
            ({"strict": "yes"}, ["strict='yes'", "True, False"]),
            ({"inductor": 1}, ["inductor=1"]),
            ({"max_rewrites": -1}, ["max_rewrites=-1"]),
            (
                {"inductor": {"max_autotone": True}},
                ["'max_autotone'", "no Inductor config", "Did you mean 'max_autotune'"],
            ),
            ({"inductor": {"use_post_grad_passes": False}}, ["use_post_grad_passes", "backend='inductor'"]),
            ({"inductor": False, "mode": "reduce-overhead"}, ["mode='reduce-overhead'", "inductor=False"]),
        ],
    )
    def test_options(self, options: dict[str, Any], parts: list[str]) -> None:
        model, x = moe(), hidden_states()
        with torch.no_grad(), pytest.raises(ValueError, match="moe_rocm") as caught:
            torch.compile(model, backend="moe_rocm", options=options)(x)
        assert isinstance(caught.value, OptionError)
        for part in parts:
            assert part in str(caught.value)
        model(x)

    @pytest.mark.parametrize("inductor", [True, False])
    def test_strict_lists_every_block(self, inductor: bool) -> None:
        model, x = nn.Sequential(moe(), moe(seed=1)), hidden_states()
        with pytest.raises(ValueError, match="strict=True, and 2 expert blocks") as caught:
            compiled_with(model, strict=True, inductor=inductor)(x)
        assert isinstance(caught.value, RewriteRefused)
        for part in (f"0.experts: {GRADIENTS}", f"1.experts: {GRADIENTS}"):
            assert part in str(caught.value)
        model(x)

    def test_nothing_runs_before_a_refusal_also_if_the_first_graph_has_no_experts(self) -> None:
        model = Breaks()
        with torch.no_grad(), pytest.raises(BackendRefused, match=r"cannot run on this machine \(cpu\)"):
            compiled_with(model, moe_backend="aiter")(hidden_states())
        assert model.ran == []

    def test_the_error_can_be_sent_to_another_process(self) -> None:
        with torch.no_grad(), pytest.raises(BackendRefused) as caught:
            compiled_with(moe(), moe_backend="aiter")(hidden_states())
        sent = pickle.loads(pickle.dumps(caught.value))
        assert (type(sent), str(sent)) == (BackendRefused, str(caught.value))

    def test_the_environment_can_refuse_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOE_COMPILE_MOE_BACKEND", "aiter")
        with torch.no_grad(), pytest.raises(BackendRefused):
            torch.compile(moe(), backend="moe_rocm")(hidden_states())


def gradients(model: nn.Module, run: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    run(x).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(actual[name], gradient) < 2e-2, name


class TestGradients:
    @pytest.mark.parametrize("spelling", ["grouped", "batched"])
    def test_training_is_left_alone(self, spelling: str, calls: list[int]) -> None:
        model, x = moe(spelling), hidden_states()
        compiled = compiled_with(model)
        assert_same_gradients(gradients(model, compiled, x), gradients(model, model, x))
        assert calls == []
        (layer,) = only_report().layers
        assert (layer.reason, layer.moe_backend) == (GRADIENTS, None)
        with torch.no_grad():
            compiled(x)
        assert calls == [len(x)]

    def test_inference_first_then_training(self, calls: list[int]) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.no_grad():
            compiled(x)
        assert calls == [len(x)]
        assert_same_gradients(gradients(model, compiled, x), gradients(model, model, x))
        assert calls == [len(x)]

    def test_training_with_inductor(self, calls: list[int]) -> None:
        model, x = moe("batched"), hidden_states()
        compiled = compiled_with(model, inductor=True)
        assert_same_gradients(gradients(model, compiled, x), gradients(model, model, x))
        assert calls == []
        assert only_report().skipped == 1

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    def test_inference_modes(self, mode: Any, calls: list[int]) -> None:
        model, x = moe(), hidden_states()
        with mode():
            out = compiled_with(model)(x)
            assert relative_error(out, with_mxfp8_weights(model)(x)) < CLOSE
        assert calls == [len(x)]

    def test_from_inference_mode_to_no_grad_and_back(self, calls: list[int]) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.inference_mode():
            first = compiled(x)
        with torch.no_grad():
            assert torch.equal(compiled(x), first)
        with torch.inference_mode():
            assert torch.equal(compiled(x), first)
        assert calls == [len(x)] * 3
        assert packed_weights.statistics().entries == 1

    def test_frozen_parameters_with_gradients_enabled_are_rewritten(self, calls: list[int]) -> None:
        model, x = moe().requires_grad_(False), hidden_states()
        compiled = compiled_with(model)
        out = compiled(x)
        assert not out.requires_grad
        assert calls == [len(x)]
        model.requires_grad_(True)
        assert_same_gradients(gradients(model, compiled, x), gradients(model, model, x))
        assert calls == [len(x)]

    @pytest.mark.parametrize("trainable", ["router", "hidden states"])
    def test_gradients_that_flow_through_frozen_experts(self, trainable: str, calls: list[int]) -> None:
        model = moe().requires_grad_(False)
        before = nn.Linear(H, H, dtype=torch.bfloat16)
        whole = nn.Sequential(before, model)
        if trainable == "router":
            before.requires_grad_(False)
            model.router.requires_grad_(True)
        x = hidden_states()
        found, expected = gradients(whole, compiled_with(whole), x), gradients(whole, whole, x)
        assert len(expected) == (1 if trainable == "router" else 2)
        assert_same_gradients(found, expected)
        assert calls == []
        assert only_report().layers[0].reason == GRADIENTS

    def test_an_input_that_requires_grad(self, calls: list[int]) -> None:
        model = moe().requires_grad_(False)
        compiled = compiled_with(model)
        compiled(hidden_states())
        x, y = hidden_states().requires_grad_(), hidden_states().requires_grad_()
        compiled(x).sum().backward()
        model(y).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert relative_error(x.grad, y.grad) < 2e-2
        assert len(calls) == 1

    def test_no_grad_inside_the_model(self, calls: list[int]) -> None:
        experts = moe()

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                out: Tensor = experts(x)
            return out

        x = hidden_states()
        out = torch.compile(run, backend="moe_rocm", options=AOT)(x)
        assert not out.requires_grad
        assert min(relative_error(out, run(x)), relative_error(out, with_mxfp8_weights(experts)(x))) < CLOSE

    def test_autocast_is_right_or_left_alone(self, calls: list[int]) -> None:
        model, x = moe("batched", dtype=torch.float32), hidden_states(dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = compiled_with(model)(x)
            (layer,) = only_report().layers
            yardstick = with_mxfp8_weights(model) if layer.rewritten else model
            assert relative_error(out, yardstick(x)) < CLOSE
        assert layer.rewritten or layer.reason


class TestChangesOfWeights:
    @pytest.mark.parametrize("change", ["copy_", "load_state_dict", "assign", "add_", "data"])
    @pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
    def test_the_next_call_follows(self, change: str, tensor: str) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.no_grad():
            before = compiled(x)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            weight = state[f"experts.{tensor}"]
            weight.neg_().add_(0.1)
            parameter = getattr(model.experts, tensor)
            if change == "copy_":
                parameter.copy_(weight)
            elif change == "add_":
                parameter.add_(weight - parameter)
                weight.copy_(parameter)
            elif change == "data":
                parameter.data.copy_(weight)
                assert torch.equal(compiled(x), before)
                assert moe_compile.refresh(model) == 1
            else:
                model.load_state_dict(state, assign=change == "assign")
            out = compiled(x)
            assert torch.equal(getattr(model.experts, tensor), weight)
            assert relative_error(out, with_mxfp8_weights(model)(x)) < CLOSE
            assert relative_error(out, before) > 0.1
        gc.collect()
        assert packed_weights.statistics().entries == 1
        assert len(moe_compile.reports()) == 1, "changed weights need no new compile"

    def test_an_optimizer_step(self) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.no_grad():
            compiled(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        compiled(x).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert relative_error(compiled(x), with_mxfp8_weights(model)(x)) < CLOSE

    def test_dropped_with_the_model(self) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.no_grad():
            compiled(x)
        assert packed_weights.statistics().entries == 1
        del model, compiled
        gc.collect()
        assert packed_weights.statistics() == packed_weights.Statistics(0, 0)

    def test_tied_layers_share_one_pack(self) -> None:
        first, second = moe(), moe(seed=1)
        second.experts.gate_up_proj, second.experts.down_proj = first.experts.gate_up_proj, first.experts.down_proj
        x = hidden_states()
        with torch.no_grad():
            outs = torch.compile(lambda x: (first(x), second(x)), backend="moe_rocm", options=AOT)(x)
            assert only_report().rewritten == 2
            assert packed_weights.statistics().entries == 1
            for out, layer in zip(outs, (first, second), strict=True):
                assert relative_error(out, with_mxfp8_weights(layer)(x)) < CLOSE

    def test_layers_compiled_one_by_one(self) -> None:
        """Regional compilation: the layers share one compiled graph, each with its own weights."""
        layers, x = [moe(seed=seed) for seed in range(3)], hidden_states()
        for layer in layers:
            layer.compile(backend="moe_rocm", options=AOT)
        with torch.no_grad():
            for _ in range(2):
                for layer in layers:
                    eager = with_mxfp8_weights(layer)
                    assert relative_error(layer(x), eager.forward(x)) < CLOSE
            layers[1].experts.down_proj.mul_(-1)
            assert relative_error(layers[1](x), with_mxfp8_weights(layers[1]).forward(x)) < CLOSE
        assert packed_weights.statistics().entries == 3

    def test_copies_of_the_model(self) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        with torch.no_grad():
            before = compiled(x)
            copied, sent = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            for other in (copied, sent):
                other.experts.down_proj.mul_(-1)
                out = compiled_with(other)(x)
                assert relative_error(out, with_mxfp8_weights(other)(x)) < CLOSE
            assert torch.equal(compiled(x), before)
            copy_of_compiled = copy.deepcopy(compiled)
            copy_of_compiled.experts.down_proj.mul_(-1)
            assert relative_error(copy_of_compiled(x), -before) < CLOSE
            assert torch.equal(compiled(x), before)


class Merged(nn.Module):
    """LoRA merged on the fly: the weight of the projection is computed in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = moe("batched")
        self.a = nn.Parameter(torch.randn(E, H, 4, dtype=torch.bfloat16) * 0.1)
        self.b = nn.Parameter(torch.randn(E, 4, I, dtype=torch.bfloat16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.moe.router(x).float(), -1)
        weights, ids = torch.topk(scores, K, dim=-1)
        rows, flat = x.repeat_interleave(K, 0), ids.reshape(-1)
        rows = torch.bmm(self.moe.experts.gate_up_proj[flat], rows.unsqueeze(-1)).squeeze(-1)
        down = self.moe.experts.down_proj + self.a @ self.b
        rows = torch.bmm(down[flat], self.moe.experts.gate(rows).unsqueeze(-1)).squeeze(-1)
        return (rows * weights.to(x.dtype).reshape(-1, 1)).view(len(x), K, -1).sum(1)


def test_weights_merged_on_the_fly_are_left_alone(calls: list[int]) -> None:
    model, x = Merged(), hidden_states()
    with torch.no_grad():
        assert relative_error(compiled_with(model)(x), model(x)) < CLOSE
    assert calls == []
    assert only_report().rewritten == 0
    assert "only parameters and buffers are packed" in (only_report().layers[-1].reason or "")


class TestThreads:
    def test_two_models_with_different_options(self, calls: list[int]) -> None:
        x = hidden_states()
        models = [moe(), moe(seed=1)]
        optioned = [compiled_with(models[0], activations="mxfp8"), compiled_with(models[1], max_rewrites=0)]
        with torch.no_grad():
            for _ in range(2):
                for model, compiled in zip(models, optioned, strict=True):
                    error = relative_error(compiled(x), model(x))
                    assert error > 0.02 if model is models[0] else error < CLOSE
        assert calls == [len(x)] * 2

    def test_one_model_under_two_sets_of_options(self, calls: list[int]) -> None:
        model, x = moe(), hidden_states()
        rewritten, alone = compiled_with(model), compiled_with(model, max_rewrites=0)
        with torch.no_grad():
            for _ in range(2):
                assert relative_error(rewritten(x), model(x)) > 0.02
                assert relative_error(alone(x), model(x)) < CLOSE
        assert calls == [len(x)] * 2

    def test_two_threads_compile_at_once(self) -> None:
        x = hidden_states()
        models = [moe(), moe(seed=1), moe("batched", seed=2)]
        results: dict[int, Tensor] = {}
        barrier = threading.Barrier(len(models))

        def work(i: int) -> None:
            compiled = compiled_with(models[i])
            barrier.wait()
            with torch.no_grad():
                results[i] = compiled(x)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            for i, model in enumerate(models):
                assert relative_error(results[i], with_mxfp8_weights(model)(x)) < CLOSE
        assert sum(report.rewritten for report in moe_compile.reports()) >= 1

    def test_threads_share_one_compiled_model(self) -> None:
        model, x = moe(), hidden_states()
        compiled = compiled_with(model)
        results: list[Tensor] = []

        def work() -> None:
            with torch.no_grad():
                results.append(compiled(x))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert all(torch.equal(result, results[0]) for result in results)
        assert packed_weights.statistics().entries == 1
