"""verify: errors by numbers, a kernel that is wrong in one block, and the bisection that finds it."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dump_models import TwoLayers, compile_and_run
from moe_modules import E, hidden_states
from torch import Tensor

from moe_compile import cli, verification
from moe_compile.block_errors import collecting, measure
from moe_compile.errors import ModelFailed
from moe_compile.kernels import ops
from moe_compile.options import CompileOptions

OPTIONS = CompileOptions(inductor=False)
NAMES = ["layers.0.experts", "layers.1.experts"]


@pytest.fixture
def second_block_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives three times the result for the weights of layers.1."""
    down = TwoLayers().layers[1].experts.down_proj
    run = ops._run

    def run_broken(*args: Any, **kwargs: Any) -> Tensor:
        """Schema order: kernel, hidden_states, topk_ids, topk_weights, gate_up_proj, down_proj, …"""
        return run(*args, **kwargs) * (3 if torch.equal(args[5], down) else 1)

    monkeypatch.setattr(ops, "_run", run_broken)


class TestMeasure:
    def test_by_hand(self) -> None:
        """Token 1 is off by 10 %, and it alone goes to expert 2."""
        original = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 5.0]])
        rewritten = original.clone()
        rewritten[1] *= 1.1
        found = measure("x", original, rewritten, torch.tensor([[0, 1], [1, 2], [0, 3]]))
        assert found is not None
        assert found.tokens == 3
        assert found.relative_error == pytest.approx(1 / math.sqrt(25 + 100 + 25))
        assert found.snr == pytest.approx(-20 * math.log10(found.relative_error))
        assert (found.worst_token, found.worst_expert) == (1, 2)
        assert found.worst_token_error == pytest.approx(0.1)
        assert found.worst_expert_error == pytest.approx(0.1)

    def test_ids_out_of_range_are_no_expert(self) -> None:
        original = torch.ones(2, 4)
        found = measure("x", original, original * torch.tensor([[2.0], [1.1]]), torch.tensor([[-1], [3]]))
        assert found is not None
        assert (found.worst_token, found.worst_expert) == (0, 3)
        assert found.worst_expert_error == pytest.approx(0.1)

    def test_no_error_at_all(self) -> None:
        found = measure("x", torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.zeros(2, 1, dtype=torch.int32))
        assert found is not None
        assert found.relative_error == 0
        assert found.snr == math.inf
        assert json.dumps(found.to_dict(), allow_nan=False)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nan_and_infinity_exceed_every_threshold(self, bad: float) -> None:
        found = measure("x", torch.ones(2, 4), torch.full((2, 4), bad), torch.zeros(2, 1, dtype=torch.int64))
        assert found is not None
        assert found.exceeds(1e9)
        assert json.dumps(found.to_dict(), allow_nan=False)

    def test_no_tokens(self) -> None:
        assert measure("x", torch.ones(0, 4), torch.ones(0, 4), torch.ones(0, 2, dtype=torch.int64)) is None


class TestOption:
    @pytest.mark.parametrize("inductor", [False, True])
    def test_results_do_not_change_and_errors_are_measured(self, inductor: bool) -> None:
        plain = compile_and_run(TwoLayers(), inductor=inductor)
        with collecting() as found:
            assert torch.equal(compile_and_run(TwoLayers(), inductor=inductor, verify=True), plain)
        assert [error.name for error in found] == NAMES
        for error in found:
            assert 0.005 < error.relative_error < 0.08
            assert 0 <= error.worst_expert < E
            assert error.worst_token_error >= error.relative_error

    def test_it_is_measured_in_the_first_run_alone(self) -> None:
        compiled: Any = torch.compile(TwoLayers(), backend="moe_rocm", options={"inductor": False, "verify": True})
        with torch.no_grad(), collecting() as found:
            compiled(hidden_states())
            compiled(hidden_states())
        assert len(found) == 2

    def test_a_warm_cache_is_not_used(self) -> None:
        for _ in range(2):
            with collecting() as found:
                compile_and_run(TwoLayers(), inductor=True, verify=True)
            assert [error.name for error in found] == NAMES

    @pytest.mark.usefixtures("second_block_wrong")
    def test_a_wrong_block_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "moe_compile.verify"):
            compile_and_run(TwoLayers(), verify=True)
        levels = {
            r.getMessage().split()[2].rstrip(":"): r.levelno for r in caplog.records if "verify" in r.getMessage()
        }
        assert levels == {NAMES[0]: logging.INFO, NAMES[1]: logging.WARNING}


class TestVerify:
    def test_a_right_model(self) -> None:
        found = verification.verify(OPTIONS, TwoLayers(), (hidden_states(),), {})
        assert found.passed
        assert [block.name for block in found.blocks] == NAMES
        assert found.output.name == "output"
        assert 0.001 < found.output.relative_error < 0.08
        assert 0 < found.output.kl_divergence < 0.01
        assert found.output.top1_agreement >= 0.5
        assert verification.bisect(OPTIONS, TwoLayers(), (hidden_states(),), {}) is None

    @pytest.mark.usefixtures("second_block_wrong")
    def test_a_wrong_block_and_its_bisection(self) -> None:
        found = verification.verify(OPTIONS, TwoLayers(), (hidden_states(),), {})
        assert not found.passed
        assert [block.name for block in found.failed] == [NAMES[1]]
        assert found.blocks[1].relative_error == pytest.approx(2, abs=0.1)
        steps: list[verification.BisectStep] = []
        assert verification.bisect(OPTIONS, TwoLayers(), (hidden_states(),), {}, step=steps.append) == NAMES[1]
        assert [(step.rewrites, step.wrong) for step in steps] == [(2, True), (1, False)]

    def test_the_threshold(self) -> None:
        found = verification.verify(OPTIONS, TwoLayers(), (hidden_states(),), {}, threshold=1e-4)
        assert len(found.failed) == 2

    def test_arguments_that_the_model_changes(self) -> None:
        class Counting(TwoLayers):
            def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
                assert cache is not None
                cache += 1
                return super().forward(x) * cache

        cache = torch.zeros(1)
        found = verification.verify(OPTIONS, Counting(), (hidden_states(), cache), {})
        assert found.output.relative_error < 0.08
        assert torch.equal(cache, torch.zeros(1))


class TestWhatCannotBeBisected:
    class Counting(TwoLayers):
        """Its output depends on how often it was called."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().forward(x) * self.calls

    def test_a_model_with_state(self) -> None:
        with pytest.raises(ModelFailed, match="differs from itself on a second run"):
            verification.bisect(OPTIONS, self.Counting(), (hidden_states(),), {})

    def test_a_model_whose_own_output_is_not_finite(self) -> None:
        model = TwoLayers()
        with torch.no_grad():
            model.layers[1].experts.down_proj.fill_(math.nan)
        with pytest.raises(ModelFailed, match="own output is not finite"):
            verification.bisect(OPTIONS, model, (hidden_states(),), {})
        result = verification.verify(OPTIONS, model, (hidden_states(),), {})
        assert not result.passed
        assert math.isnan(result.output.top1_agreement)
        assert any("the original model's own output is not finite" in line for line in verification.text(result))


class TestOutputError:
    def test_by_hand(self) -> None:
        expected = torch.tensor([[0.0, math.log(3)], [1.0, 0.0]])
        actual = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        found = verification.output_error("logits", expected, actual)
        # KL((1/4, 3/4) || (1/2, 1/2)) = 1/4 log(1/2) + 3/4 log(3/2), for one token of two
        assert found.kl_divergence == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
        assert found.top1_agreement == 0.5
        assert found.relative_error == pytest.approx(math.log(3) / math.sqrt(math.log(3) ** 2 + 1))


class TestCommand:
    @pytest.fixture
    def factory(self, tmp_path: Path) -> str:
        support = Path(__file__).parents[1] / "support"
        (tmp_path / "f.py").write_text(
            f"import sys; sys.path.insert(0, {str(support)!r})\n"
            "import dump_models, moe_modules, torch\n"
            "def make(): return dump_models.TwoLayers(), {'x': moe_modules.hidden_states()}\n"
            "def dense(): return torch.nn.Linear(4, 3), {'input': torch.ones(2, 4)}\n"
        )
        return f"{tmp_path}/f.py"

    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(["verify", *arguments, "--no-inductor"])
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, capsys.readouterr().out

    def test_right(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        code, out = self.run(capsys, f"{factory}:make", "--bisect")
        assert code == 0
        assert out.splitlines()[0] == "moe_rocm: 2/2 expert blocks -> reference; threshold 0.1"
        assert [line for line in out.splitlines() if line.startswith("ok ")] == [f"ok    {name}" for name in NAMES]
        assert "KL " in out
        assert "top-1 agreement " in out
        assert "bisect: no block takes the output beyond the threshold" in out
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.usefixtures("second_block_wrong")
    def test_wrong(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        code, out = self.run(capsys, f"{factory}:make", "--bisect")
        assert code == 1
        assert f"WRONG {NAMES[1]}" in out
        assert f"first wrong block: {NAMES[1]}" in out
        assert f"bisect: the first wrong block is {NAMES[1]}" in out

    def test_json(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        code, out = self.run(capsys, f"{factory}:make", "--json", "--threshold", "0.001")
        found = json.loads(out)
        assert code == 1
        assert found["passed"] is False
        assert [block["name"] for block in found["blocks"]] == NAMES
        assert found["output"]["top1_agreement"] >= 0.5

    def test_nothing_to_verify(self, capsys: pytest.CaptureFixture[str], factory: str) -> None:
        code, out = self.run(capsys, f"{factory}:dense")
        assert code == 1
        assert "no block was rewritten, so there is nothing to verify" in out
