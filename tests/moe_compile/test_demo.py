import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_compile import cli, demo
from moe_compile.demo import NEW_TOKENS
from moe_compile.options import CompileOptions

SCRIPT = Path(sys.executable).with_name("moe-compile")


def errors_in(text: str) -> list[float]:
    """The three errors, in their order."""
    return [float(error) for error in re.findall(r"^ +([0-9.e+-]+)   (?:compiled|that)", text, re.M)]


def check_output(text: str) -> None:
    assert "moe_rocm: 2/2 expert blocks -> " in text
    assert re.search(r"│ model.layers.1.mlp.experts +│ grouped_mm +│ H128 I64 E8 k2 ", text)
    assert re.search(rf"tokens generated: (\d+ ){{{NEW_TOKENS}}}\(random weights", text)
    compiled_to_bf16, compiled_to_yardstick, rounding = errors_in(text)
    assert 0.01 < compiled_to_bf16 < 0.06
    assert 0.01 < rounding < 0.06
    assert compiled_to_yardstick < 0.01
    assert "moe-compile explain model.py:make_model" in text


@pytest.mark.hf
def test_the_demo_as_the_readme_runs_it() -> None:
    run = subprocess.run([SCRIPT, "demo"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (run.returncode, run.stderr) == (0, "")
    check_output(run.stdout)


@pytest.mark.hf
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU, where Inductor writes C++")
def test_without_a_cpp_compiler_it_says_so_and_works() -> None:
    environ = os.environ | {"CXX": "no-such-compiler"}
    run = subprocess.run([SCRIPT, "demo"], capture_output=True, text=True, env=environ, stdin=subprocess.DEVNULL)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("No C++ compiler found (g++, or set CXX), and Inductor needs one on the CPU: using ")
    check_output(run.stdout)


@pytest.mark.hf
def test_prompt_and_decode_step_are_both_rewritten() -> None:
    steps: list[str] = []
    result = demo.run_demo(CompileOptions(inductor=False, moe_backend="reference"), steps.append)
    assert result.report.graphs == 2
    assert result.report.from_cache == 0
    assert (result.report.rewritten, result.report.skipped) == (2, 0)
    assert {layer.moe_backend for layer in result.report.layers} == {"reference"}
    assert len(result.tokens) == NEW_TOKENS
    assert len(steps) == 4


@pytest.mark.hf
def test_the_yardstick_is_a_copy_with_other_expert_weights_only() -> None:
    model = demo.tiny_minimax_m3()
    rounded = demo.with_mxfp8_experts(model)
    changed = {
        name
        for (name, ours), theirs in zip(model.named_parameters(), rounded.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    }
    assert changed == {f"model.layers.{i}.mlp.experts.{w}_proj" for i in (1, 2) for w in ("gate_up", "down")}
    weight, other = (m.model.layers[1].mlp.experts.down_proj.float() for m in (model, rounded))
    assert 0.01 < ((weight - other).norm() / weight.norm()).item() < 0.04


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else find_spec(name))
    run = CliRunner().invoke(cli.app, ["demo"])
    assert run.exit_code == 2
    assert run.stderr == (
        'moe-compile: the demo needs transformers, which is not installed: pip install "moe_compile[hf]"\n'
    )


def test_a_backend_that_cannot_run_here_is_refused() -> None:
    run = CliRunner().invoke(cli.app, ["demo", "--moe-backend", "nonsense"])
    assert run.exit_code == 2
    assert run.stderr.startswith("moe-compile: option moe_backend='nonsense' is not valid. Choices are auto, ")
