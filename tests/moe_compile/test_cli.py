"""The commands and their exit codes. What explain itself finds is tested beside it: here it mostly is a stub."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moe_compile import cli
from moe_compile.errors import BackendRefused, MoeCompileError, PackedWeightsError, RewriteRefused
from moe_compile.options import MOE_BACKENDS, CompileOptions
from moe_compile.report import CompileReport, LayerReport
from moe_compile.spec import ExpertSpec

SPEC = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2)
DONE = LayerReport("model.layers.0.mlp.experts", "grouped_mm", SPEC, "triton")
LEFT = LayerReport("model.layers.[bold]1[/bold].mlp", "grouped_mm", reason="node [mul_7] is not proven")

Explain = Callable[[CompileOptions, torch.nn.Module, tuple[Any, ...], dict[str, Any]], CompileReport]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Explain], None]:
    """Replaces the function behind `moe-compile explain`."""

    def install(explain_with: Explain) -> None:
        monkeypatch.setattr(importlib.import_module("moe_compile.explanation"), "explain_with", explain_with)

    return install


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "my models" / "model.py"
    path.parent.mkdir()
    path.write_text(
        "import torch\n"
        "def make():\n"
        "    print('printed by the factory')\n"
        "    return torch.nn.Linear(3, 4), {'input': torch.ones(1, 3)}\n"
        "def fail():\n"
        "    raise RuntimeError('no weights')\n"
    )
    return f"{path}:make"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, captured.out, captured.err


class TestRoot:
    def test_without_a_command_help_is_shown(self) -> None:
        code, out, _ = run()
        assert code == 0
        for command in ("demo", "explain", "backends", "env", "Exit codes:"):
            assert command in out

    def test_version(self) -> None:
        assert run("--version")[:2] == (0, "moe-compile 0.1.0\n")

    @pytest.mark.parametrize("command", [[], ["demo"], ["explain"], ["dump"], ["verify"], ["backends"], ["env"]])
    def test_every_command_and_option_has_help(self, command: list[str]) -> None:
        code, out, _ = run(*command, "--help")
        assert code == 0
        rows = re.findall(r"^│ +\*? *(--?[\w-]+.*?) *│$", out, re.M)
        assert rows
        for row in rows:
            assert re.search(r" [A-Z]\w* [a-z]+", row), f"no help text: {row}"

    def test_exit_codes_are_in_the_help_of_explain(self) -> None:
        text = " ".join(run("explain", "--help")[1].split())
        for code in "0123":
            assert re.search(rf"[:;] {code} ", text), code

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["bogus"],
                "No such command 'bogus'. Commands are demo, explain, dump, verify, backends, bench, quantize, env;",
            ),
            (["explain"], "Missing argument 'FACTORY'."),
            (["explain", "--bogus", "x"], "No such option: --bogus."),
            (["explain", "a", "b"], "Got unexpected extra argument"),
        ],
    )
    def test_wrong_arguments_are_one_line_on_stderr(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
    ) -> None:
        code, out, err = run_main(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("moe-compile: ")
        assert message in err
        assert err.count("\n") == 1


class TestExplain:
    def test_the_report_and_exit_code_0(self, stub: Callable[[Explain], None], factory: str) -> None:
        stub(lambda *_: CompileReport((DONE, LEFT), target="sm_90"))
        code, out, err = run("explain", factory)
        assert code == 0
        assert "moe_rocm: 1/2 expert blocks -> triton on sm_90" in out
        assert "│ model.layers.0.mlp.experts " in out
        assert "model.layers.[bold]1[/bold].mlp: left alone: node [mul_7] is not proven" in out
        assert "printed by the factory" not in out
        assert "printed by the factory" in err

    def test_model_and_arguments_reach_explain(self, stub: Callable[[Explain], None], factory: str) -> None:
        seen: list[Any] = []

        def explain_with(*arguments: Any) -> CompileReport:
            seen.extend(arguments)
            return CompileReport((DONE,))

        stub(explain_with)
        assert run("explain", factory)[0] == 0
        options, model, args, kwargs = seen
        assert options == CompileOptions()
        assert isinstance(model, torch.nn.Linear)
        assert args == ()
        assert torch.equal(kwargs["input"], torch.ones(1, 3))

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            ([], CompileOptions()),
            (["--moe-backend", "triton-native"], CompileOptions(moe_backend="triton_native")),
            (["--activations", "mxfp8"], CompileOptions(activations="mxfp8")),
            (["--no-inductor"], CompileOptions(inductor=False)),
            (["--strict"], CompileOptions()),  # the report is printed all the same, and decides the exit code
        ],
    )
    def test_options(
        self, stub: Callable[[Explain], None], factory: str, flags: list[str], expected: CompileOptions
    ) -> None:
        seen: list[CompileOptions] = []

        def explain_with(options: CompileOptions, *_: Any) -> CompileReport:
            seen.append(options)
            return CompileReport((DONE,))

        stub(explain_with)
        assert run("explain", factory, *flags)[0] == 0
        assert seen == [expected]

    def test_flags_win_over_the_environment(
        self, stub: Callable[[Explain], None], factory: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MOE_COMPILE_STRICT", "1")
        monkeypatch.setenv("MOE_COMPILE_INDUCTOR", "0")
        seen: list[CompileOptions] = []

        def explain_with(options: CompileOptions, *_: Any) -> CompileReport:
            seen.append(options)
            return CompileReport((DONE,))

        stub(explain_with)
        assert run("explain", factory, "--no-strict")[0] == 0
        assert seen == [CompileOptions(strict=False, inductor=False)]

    def test_json_is_all_there_is_on_stdout(self, stub: Callable[[Explain], None], factory: str) -> None:
        report = CompileReport((DONE, LEFT), target="sm_90")

        def explain_with(*_: Any) -> CompileReport:
            print("printed by the model")
            return report

        stub(explain_with)
        code, out, err = run("explain", factory, "--json")
        assert code == 0
        assert json.loads(out) == report.to_dict()
        assert "printed by the factory\nprinted by the model" in err

    @pytest.mark.parametrize(
        ("report", "flags", "expected"),
        [
            (CompileReport((DONE,)), [], 0),
            (CompileReport((DONE, LEFT)), [], 0),
            (CompileReport((DONE, LEFT)), ["--strict"], 1),
            (CompileReport((LEFT,)), [], 1),
            (CompileReport(), [], 1),
            (CompileReport(), ["--json"], 1),
        ],
    )
    def test_exit_code(
        self, stub: Callable[[Explain], None], factory: str, report: CompileReport, flags: list[str], expected: int
    ) -> None:
        stub(lambda *_: report)
        assert run("explain", factory, *flags)[0] == expected

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (RewriteRefused("moe_rocm: block x is left alone"), 1),
            (BackendRefused("moe_rocm: aiter cannot run:\n  - not installed"), 2),
            (PackedWeightsError("moe_rocm: inside a capture"), 3),
            (TypeError("forward() got an unexpected\nkeyword"), 3),
        ],
    )
    def test_an_error_while_compiling_or_running(
        self, stub: Callable[[Explain], None], factory: str, error: Exception, expected: int
    ) -> None:
        def explain_with(*_: Any) -> CompileReport:
            raise error

        stub(explain_with)
        code, out, err = run("explain", factory)
        assert (code, out) == (expected, "")
        text = str(error).removeprefix("moe_rocm: ")
        if not isinstance(error, MoeCompileError):
            text = f"the model of '{factory}' raised TypeError: forward() got an unexpected keyword"
        hint = " (--traceback shows where)" if expected == 3 else ""
        assert err == f"printed by the factory\nmoe-compile: {text}{hint}\n"

    @pytest.mark.parametrize(
        ("arguments", "expected", "message"),
        [
            (["nowhere.py:make"], 2, "FACTORY: there is no file 'nowhere.py'"),
            (["no_such_module:make"], 2, "there is no module 'no_such_module'"),
            (["nothing"], 2, "FACTORY 'nothing' is not of the form file.py:function or package.module:function"),
            (["{folder}/model.py:maker"], 2, "has no function 'maker'. Functions in it are fail, make. Did you mean"),
            (["{folder}/model.py:fail"], 3, "raised RuntimeError: no weights"),
            (["{folder}/model.py:torch"], 2, "torch is not a function but module"),
            (["x.py:y", "--moe-backend", "tritn"], 2, "option moe_backend='tritn' is not valid. Choices are auto, "),
            (["x.py:y", "--activations", "fp4"], 2, "option activations='fp4' is not valid. Choices are auto, bf16, "),
        ],
    )
    def test_user_errors_are_one_line_without_a_traceback(
        self, factory: str, arguments: list[str], expected: int, message: str
    ) -> None:
        folder = os.path.dirname(factory)
        code, out, err = run("explain", *(argument.format(folder=folder) for argument in arguments))
        assert (code, out) == (expected, "")
        assert err.startswith("moe-compile: ")
        assert message in err
        assert err.count("\n") == 1

    def test_a_bad_environment_variable(self, factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOE_COMPILE_STRIKT", "1")
        code, _, err = run("explain", factory)
        assert code == 2
        assert "unknown environment variable MOE_COMPILE_STRIKT" in err
        assert "Did you mean 'MOE_COMPILE_STRICT'?" in err

    def test_traceback_shows_the_users_frames(self, factory: str) -> None:
        failing = factory.replace(":make", ":fail")
        assert "Traceback" not in run("explain", failing)[2]
        code, _, err = run("explain", failing, "--traceback")
        assert code == 3
        assert "Traceback (most recent call last)" in err
        assert "model.py\", line 6, in fail\n    raise RuntimeError('no weights')" in err
        assert err.endswith(f"moe-compile: factory '{failing}' raised RuntimeError: no weights\n")


@pytest.mark.hf
class TestExplainForReal:
    """On the model of an example, without Inductor."""

    FACTORY = f"{Path(__file__).parents[2]}/examples/compile_hf_model.py:tiny_minimax_m2"

    def test_every_block_is_rewritten(self) -> None:
        code, out, _ = run("explain", self.FACTORY, "--no-inductor", "--moe-backend", "reference", "--strict", "--json")
        assert code == 0
        data = json.loads(out)
        assert [layer["name"] for layer in data["layers"]] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
        assert {(layer["form"], layer["moe_backend"]) for layer in data["layers"]} == {("grouped_mm", "reference")}
        assert data["layers"][0]["spec"]["hidden_size"] == 128

    def test_a_backend_that_cannot_run_is_refused_with_every_reason(self) -> None:
        code, out, err = run("explain", self.FACTORY, "--no-inductor", "--moe-backend", "aiter")
        assert (code, out) == (2, "")
        assert "moe-compile: moe_backend='aiter' cannot run this expert block (H128 I64 E8 k2, silu, " in err
        assert "\n  - aiter is not installed (build ROCm/aiter from source)\n" in err
        assert "\n  - hidden size must be a multiple of 256, got 128\n" in err
        assert "Traceback" not in err

    def test_a_model_whose_call_fails(self, tmp_path: Path) -> None:
        path = tmp_path / "model.py"
        path.write_text(
            "import torch\ndef make(): return torch.nn.Linear(3, 4), {'input': torch.ones(1, 5)}\n",
        )
        code, out, err = run("explain", f"{path}:make", "--no-inductor")
        assert (code, out) == (3, "")
        assert err.startswith(f"moe-compile: the model of '{path}:make' raised ")
        assert "must have same reduction dim, but got [1, 5] X [3, 4]" in err
        assert err.endswith(" (--traceback shows where)\n")
        assert err.count("\n") == 1

    def test_a_model_without_experts(self, tmp_path: Path) -> None:
        path = tmp_path / "model.py"
        path.write_text(
            "import torch\ndef make(): return torch.nn.Linear(3, 4), {'input': torch.ones(1, 3)}\n",
        )
        code, out, err = run("explain", f"{path}:make", "--no-inductor")
        assert (code, err) == (1, "")
        assert out.startswith("moe_rocm: no expert blocks found\n1 graph, 0 recompiles; packed weights: 0 KiB; ")
        assert out.count("\n") == 2

    def test_eager_experts_are_pointed_out(self, tmp_path: Path) -> None:
        path = tmp_path / "model.py"
        example, _, name = self.FACTORY.rpartition(":")
        path.write_text(
            f"import sys\nsys.path.append({os.path.dirname(example)!r})\nfrom {Path(example).stem} import {name}\n"
            f"def make():\n    model = {name}()\n    model.set_experts_implementation('eager')\n    return model\n"
        )
        code, out, _ = run("explain", f"{path}:make", "--no-inductor")
        assert code == 1
        assert "load it with experts_implementation='grouped_mm'" in " ".join(out.split())


class TestBackends:
    def test_every_backend_with_its_reasons(self) -> None:
        code, out, _ = run("backends")
        assert code == 0
        for name in MOE_BACKENDS:
            assert name in out
        assert "auto takes the first usable one" in out
        for package in ("torch", "triton", "aiter", "flydsl"):
            assert re.search(rf"^{package}: \S", out, re.M), package

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is asked about")
    def test_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        code, out, _ = run("backends", "--json")
        assert code == 0
        data = json.loads(out)
        assert {b["name"]: b["usable"] for b in data["backends"]} == {
            "aiter": False,
            "flydsl": False,
            "triton_native": False,
            "triton": False,
            "reference": True,
        }
        assert all(b["usable"] or b["rejections"] for b in data["backends"])
        assert data["gpus"] == []
        assert data["versions"]["torch"] == torch.__version__
        assert "on this machine: reference" in run("backends")[1]


class TestEnv:
    def test_versions_and_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOE_COMPILE_MOE_BACKEND", "triton")
        monkeypatch.setenv("MOE_COMPILE_TYPO", "x")
        monkeypatch.setenv("TRITON_SOMETHING", "y")
        code, out, _ = run("env", "--json")
        assert code == 0
        found = json.loads(out)
        assert found["versions"]["torch"].startswith(torch.__version__)
        assert found["variables"]["MOE_COMPILE_MOE_BACKEND"] == "triton"
        assert found["unknown_variables"] == {"MOE_COMPILE_TYPO": "x"}
        assert found["foreign_variables"]["TRITON_SOMETHING"] == "y"
        code, out, _ = run("env")
        assert code == 0
        assert out.startswith("moe_compile: 0.1.0\npython: 3.")
        assert f"\ntorch: {torch.__version__}" in out
        assert re.search(r"MOE_COMPILE_MOE_BACKEND += triton +the option moe_backend\n", out)
        assert re.search(r"MOE_COMPILE_STRICT +\(not set\) +the option strict", out)
        assert "  MOE_COMPILE_TYPO = x  unknown to moe_compile\n" in out
        assert "  TRITON_SOMETHING = y\n" in out
        assert ("GPU: none" in out) is not torch.cuda.is_available()


def test_the_console_script(factory: str) -> None:
    """As installed, in a process of its own: nothing but one line for a user's mistake."""
    script = Path(sys.executable).with_name("moe-compile")
    wrong = subprocess.run([script, "explain", factory + "r"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("moe-compile: FACTORY ")
    assert wrong.stderr.endswith("has no function 'maker'. Functions in it are fail, make. Did you mean 'make'?\n")
    assert wrong.stderr.count("\n") == 1


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "moe_compile", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "moe-compile 0.1.0\n")
