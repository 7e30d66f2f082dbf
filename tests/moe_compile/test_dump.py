"""dump_dir: which files there are, that they run, and that they are the same each time."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dump_models import TwoLayers, compile_and_run, run_file
from moe_modules import hidden_states
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_compile import cli, dump, dump_bytecode, dump_run
from moe_compile.dump_code import printable
from moe_compile.dump_index import escaped
from moe_compile.errors import OptionError
from moe_compile.options import CompileOptions

GRAPH_FILES = {
    "aten.inputs.safetensors",
    "aten_after.outputs.safetensors",
    "aten_after.py",
    "aten_before.outputs.safetensors",
    "aten_before.py",
    "block0.diff",
    "block1.diff",
    "bytecode.py",
    "dynamo.inputs.safetensors",
    "dynamo.outputs.safetensors",
    "dynamo.py",
    "guards.txt",
    "run_graph.py",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    dump.close_all()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(dump_bytecode, "_warned", False)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dump for the tests that only read."""
    folder = tmp_path_factory.mktemp("dump")
    compile_and_run(TwoLayers(), dump_dir=folder)
    return folder / "rank0"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestFiles:
    def test_every_file_is_there(self, dumped: Path) -> None:
        assert names(dumped) >= {"index.md", "index.html", "report.json", "graph0"}
        assert names(dumped / "graph0") == GRAPH_FILES

    def test_the_report(self, dumped: Path) -> None:
        found = json.loads((dumped / "report.json").read_text())
        assert found["rewritten"] == 2
        assert [layer["name"] for layer in found["layers"]] == ["layers.0.experts", "layers.1.experts"]

    @pytest.mark.parametrize("name", ["dynamo", "aten_before", "aten_after"])
    def test_a_graph_runs_and_gives_what_was_recorded(self, dumped: Path, name: str) -> None:
        done = run_file(dumped / "graph0" / f"{name}.py")
        assert done.returncode == 0, done.stderr
        assert "8 input tensors, 8 of them recorded" in done.stdout
        assert "output0: bfloat16 [6, 50]" in done.stdout
        assert "relative error to the recorded output 0.0e+00" in done.stdout

    def test_the_recorded_outputs_are_the_models(self, dumped: Path) -> None:
        with torch.no_grad():
            expected = TwoLayers()(hidden_states())
        for name in ("dynamo", "aten_before"):
            actual = load_file(dumped / "graph0" / f"{name}.outputs.safetensors")["output0"]
            assert dump_run.relative_error(actual, expected) < 0.01
        after = load_file(dumped / "graph0" / "aten_after.outputs.safetensors")["output0"]
        assert 0.002 < dump_run.relative_error(after, expected) < 0.1  # MXFP8

    def test_another_output_is_exit_code_1(self, dumped: Path, tmp_path: Path) -> None:
        graph = tmp_path / "graph0"
        subprocess.run(["cp", "-r", dumped / "graph0", graph], check=True)
        code = (graph / "aten_before.py").read_text()
        (graph / "aten_before.py").write_text(code.replace("aten.mul.Tensor", "aten.add.Tensor"))
        assert run_file(graph / "aten_before.py").returncode == 1

    def test_without_records_inputs_are_made_from_seeds(self, dumped: Path, tmp_path: Path) -> None:
        for name in ("aten_before.py", "run_graph.py"):
            (tmp_path / name).write_text((dumped / "graph0" / name).read_text())
        runs = [run_file(tmp_path / "aten_before.py") for _ in range(2)]
        assert runs[0].returncode == 0, runs[0].stderr
        assert "8 input tensors, 0 of them recorded, the others random" in runs[0].stdout
        assert runs[0].stdout == runs[1].stdout

    def test_layer_names_are_section_comments(self, dumped: Path) -> None:
        for name in ("dynamo", "aten_before", "aten_after"):
            code = (dumped / "graph0" / f"{name}.py").read_text()
            sections = re.findall(r"^        # (\S+)$", code, re.M)
            assert "layers.0.experts" in sections
            assert sections.index("layers.0.experts") < sections.index("layers.1.experts")

    def test_the_diff_of_a_block(self, dumped: Path) -> None:
        lines = (dumped / "graph0" / "block1.diff").read_text().splitlines()
        added = [line for line in lines[2:] if line.startswith("+")]
        removed = [line for line in lines[2:] if line.startswith("-")]
        assert len(added) == 1
        assert "torch.ops.moe_compile.reference_experts" in added[0]
        assert sum("_grouped_mm.default" in line for line in removed) == 2

    def test_the_index_links_every_file(self, dumped: Path) -> None:
        index = (dumped / "index.md").read_text()
        for name in GRAPH_FILES:
            assert f"[{name}](graph0/{name}): " in index
        assert "| layers.0.experts | grouped\\_mm | H64 I32 E4 k2 | silu | reference |" in index
        assert "not available on this machine" in index

    def test_bytecode_and_guards(self, dumped: Path) -> None:
        assert "__compiled_fn(" in (dumped / "graph0" / "bytecode.py").read_text()
        assert "size=[6, 64]" in (dumped / "graph0" / "guards.txt").read_text()


class TestStable:
    def test_two_dumps_are_the_same(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            compile_and_run(TwoLayers(), dump_dir=tmp_path / name)
        first, second = (tmp_path / name / "rank0" for name in ("one", "two"))
        files = {path.relative_to(first) for path in first.rglob("*") if path.is_file()}
        assert files == {path.relative_to(second) for path in second.rglob("*") if path.is_file()}
        for file in files - {Path("report.json")}:
            assert (first / file).read_bytes() == (second / file).read_bytes(), file
        reports = [json.loads((folder / "report.json").read_text()) | {"seconds": 0} for folder in (first, second)]
        assert reports[0] == reports[1]

    def test_a_second_run_overwrites_nothing(self, tmp_path: Path) -> None:
        compile_and_run(TwoLayers(), dump_dir=tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        dump.close_all()  # as another process
        compile_and_run(TwoLayers(), dump_dir=tmp_path)
        assert names(tmp_path) == {"rank0", "rank0_run2"}
        assert {path: path.read_bytes() for path in before} == before

    def test_two_models_of_one_process_are_two_graphs(self, tmp_path: Path) -> None:
        compile_and_run(TwoLayers(), dump_dir=tmp_path)
        compile_and_run(TwoLayers(), hidden_states(9), dump_dir=tmp_path)
        assert names(tmp_path) == {"rank0"}
        assert {"graph0", "graph1"} <= names(tmp_path / "rank0")
        assert "size=[9, 64]" in (tmp_path / "rank0" / "graph1" / "guards.txt").read_text()

    def test_two_ranks_do_not_collide(self, tmp_path: Path) -> None:
        code = (
            "import sys, dump_models, torch\ndump_models.compile_and_run(dump_models.TwoLayers(), dump_dir=sys.argv[1])"
        )
        support = str(Path(__file__).parents[1] / "support")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code, tmp_path],
                env={**os.environ, "RANK": str(rank), "PYTHONPATH": support},
            )
            for rank in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert names(tmp_path) == {"rank0", "rank1"}
        assert names(tmp_path / "rank0" / "graph0") == names(tmp_path / "rank1" / "graph0") == GRAPH_FILES

    @pytest.mark.parametrize(("text", "expected"), [("3", 3), ("", 0)])
    def test_the_rank(self, monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
        monkeypatch.setenv("RANK", text)
        assert dump.rank() == expected

    @pytest.mark.parametrize("text", ["abc", "../x", "-1"])
    def test_a_rank_that_is_no_number_is_refused(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv("RANK", text)
        with pytest.raises(OptionError, match=f"the variable RANK is '{text}'"):
            dump.rank()


class TestCompiling:
    def test_a_warm_cache_is_dumped_just_the_same(self, tmp_path: Path) -> None:
        compile_and_run(TwoLayers(), inductor=True)
        compile_and_run(TwoLayers(), inductor=True, dump_dir=tmp_path)
        graph = tmp_path / "rank0" / "graph0"
        assert names(graph) == GRAPH_FILES | {"inductor.py"}
        assert "torch.ops.moe_compile.reference_experts" in (graph / "inductor.py").read_text()
        assert run_file(graph / "aten_after.py").returncode == 0

    def test_the_result_is_the_same(self, tmp_path: Path) -> None:
        plain = compile_and_run(TwoLayers())
        assert torch.equal(compile_and_run(TwoLayers(), dump_dir=tmp_path), plain)

    def test_dynamic_sizes(self, tmp_path: Path) -> None:
        x = hidden_states(7)
        torch._dynamo.mark_dynamic(x, 0)
        compile_and_run(TwoLayers(), x, dump_dir=tmp_path)
        graph = tmp_path / "rank0" / "graph0"
        assert "[s" in (graph / "aten_before.py").read_text()
        for name in ("aten_before", "aten_after"):
            done = run_file(graph / f"{name}.py")
            assert done.returncode == 0, done.stderr
            assert "output0: bfloat16 [7, 50]" in done.stdout
            assert "recorded output 0.0e+00" in done.stdout

    def test_constants_of_the_graph_are_recorded(self, tmp_path: Path) -> None:
        class WithConstant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * torch.tensor([1.0, 2.0, 4.0])

        compile_and_run(WithConstant(), torch.ones(3), dump_dir=tmp_path)
        done = run_file(tmp_path / "rank0" / "graph0" / "aten_before.py")
        assert done.returncode == 0, done.stderr
        assert "norm 4.58258" in done.stdout

    def test_a_training_graph_has_a_backward(self, tmp_path: Path) -> None:
        options = {"dump_dir": str(tmp_path)}
        model: Any = torch.compile(nn.Linear(4, 3), backend="moe_rocm", options=options)
        model(torch.ones(2, 4)).sum().backward()
        graph = tmp_path / "rank0" / "graph0"
        assert {"aten_before.py", "aten_after.py", "inductor.py", "inductor1.py"} <= names(graph)
        assert run_file(graph / "aten_before.py").returncode == 0

    @pytest.mark.parametrize("inductor", [False, True])
    def test_graphs_in_a_graph(self, tmp_path: Path, inductor: bool) -> None:
        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = TwoLayers()

            def forward(self, x: Tensor) -> Tensor:
                y = self.inner(x)
                out: Tensor = torch.cond(y.sum() > 0, lambda z: z + 1, lambda z: z - 1, (y,))
                return out

        compile_and_run(Branches(), dump_dir=tmp_path, inductor=inductor)
        graph = tmp_path / "rank0" / "graph0"
        # Inductor's pass runs on each branch, then on the whole.
        expected_files = {"aten_before.py", "aten1_before.py", "aten2_before.py"} if inductor else {"aten_before.py"}
        assert {path.name for path in graph.glob("aten*_before.py")} == expected_files
        done = run_file(graph / ("aten2_before.py" if inductor else "aten_before.py"))
        assert done.returncode == 0, done.stderr
        assert "recorded output 0.0e+00" in done.stdout

    def test_graphs_go_to_the_structured_trace(self, tmp_path: Path) -> None:
        code = (
            "import sys, dump_models, torch\ndump_models.compile_and_run(dump_models.TwoLayers(), dump_dir=sys.argv[1])"
        )
        trace = tmp_path / "trace"
        environment = {
            **os.environ,
            "TORCH_TRACE": str(trace),
            "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        }
        subprocess.run([sys.executable, "-P", "-c", code, tmp_path / "dump"], env=environment, check=True)
        [log] = trace.glob("*.log")
        for name in ("dynamo", "aten_before", "aten_after"):
            assert f'{{"name": "moe_compile_graph0_{name}", "encoding": "string"}}' in log.read_text()


class TestDepyf:
    """depyf 0.20 cannot decompile a function with a graph break on torch 2.13; the rest must not suffer."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoLayers()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            i = torch.arange(3)
            z = y[i]
            if z.sum() > 0:
                return z + 1
            return z - 1

    def test_a_graph_break(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "moe_compile"):
            compile_and_run(self.Broken(), dump_dir=tmp_path)
        assert names(tmp_path / "rank0" / "graph0") == GRAPH_FILES
        assert {"dynamo.py", "bytecode.py", "guards.txt"} <= names(tmp_path / "rank0" / "graph1")
        # Python 3.11 and torch 2.13: SWAP in the function before the break.
        failed = (tmp_path / "rank0" / "graph0" / "bytecode.py").read_text().startswith("# depyf")
        assert len([m for m in caplog.messages if "cannot decompile" in m]) == failed
        for name in ("dynamo", "aten_before", "aten_after"):
            done = run_file(tmp_path / "rank0" / "graph0" / f"{name}.py")
            assert "recorded output 0.0e+00" in done.stdout, done.stderr

    def test_a_failure_is_one_warning_and_a_disassembly(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(code: object) -> str:
            raise KeyError("SWAP")

        monkeypatch.setattr("depyf.decompile", fail)
        with caplog.at_level(logging.WARNING, "moe_compile"):
            compile_and_run(self.Broken(), dump_dir=tmp_path)
        assert len([m for m in caplog.messages if "cannot decompile" in m]) == 1
        graph = tmp_path / "rank0" / "graph0"
        assert names(graph) == GRAPH_FILES
        assert "CALL" in (graph / "bytecode.py").read_text()
        assert "Not complete: depyf 0.20" in (tmp_path / "rank0" / "index.md").read_text().replace("\\", "")
        compile((graph / "bytecode.py").read_text(), "bytecode.py", "exec")  # comments alone

    def test_a_backend_called_without_dynamo(self, tmp_path: Path) -> None:
        """No frame, so no bytecode and no guards."""
        from moe_compile.backend import moe_rocm

        class Pair(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor]:
                return (x + 1,)

        gm = torch.fx.symbolic_trace(Pair())
        x = torch.ones(2, 4)
        with torch.no_grad():
            moe_rocm(gm, [x], options={"dump_dir": str(tmp_path), "inductor": False})(x)
        assert {"dynamo.py", "aten_before.py"} <= names(tmp_path / "rank0" / "graph0")


class TestUntrustedNames:
    def test_names_in_comments_and_pages(self) -> None:
        assert printable('a\nimport os\n"""\x1b[31m') == "a\\nimport os\\n'''\\x1b[31m"
        assert escaped("<script>|`x`|[y](z)") == "\\<script\\>\\|\\`x\\`\\|\\[y\\](z)"

    def test_no_name_becomes_a_path(self, tmp_path: Path) -> None:
        evil = "../../evil\n__import__('os').abort()#<b>"
        model = nn.Module()
        model.add_module("x", TwoLayers())
        model._modules[evil] = model._modules.pop("x")  # add_module refuses dots
        model.forward = lambda x: model._modules[evil](x)  # type: ignore[method-assign]
        compile_and_run(model, dump_dir=tmp_path / "out")
        assert names(tmp_path) == {"out"}
        graph = tmp_path / "out" / "rank0" / "graph0"
        assert names(graph) == GRAPH_FILES
        for name in ("dynamo", "aten_before", "aten_after"):
            assert run_file(graph / f"{name}.py").returncode == 0
        assert "<b>" not in (tmp_path / "out" / "rank0" / "index.md").read_text().replace("\\<", "")


class TestErrors:
    @pytest.mark.parametrize("value", ["", 3, True])
    def test_a_bad_value(self, value: Any) -> None:
        with pytest.raises(OptionError, match="dump_dir=.*the path of a folder"):
            CompileOptions(dump_dir=value)

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OptionError, match="dump_dir='.*file/x' cannot be written: Not a directory"):
            compile_and_run(TwoLayers(), dump_dir=str(tmp_path / "file" / "x"))


class TestCommand:
    def test_dump(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        support = Path(__file__).parents[1] / "support"
        (tmp_path / "f.py").write_text(
            f"import sys; sys.path.insert(0, {str(support)!r})\n"
            "import dump_models, moe_modules\n"
            "def make(): return dump_models.TwoLayers(), {'x': moe_modules.hidden_states()}\n"
        )
        with pytest.raises(SystemExit) as exit_:
            cli.main(["dump", f"{tmp_path}/f.py:make", "-o", str(tmp_path / "out"), "--no-inductor"])
        out, err = capsys.readouterr()
        assert exit_.value.code == 0, err
        assert "2/2 expert blocks -> reference" in out
        assert f"wrote 1 graph. Start at {tmp_path}/out/rank0/index.html" in out
        assert "... compiling" in err
        assert names(tmp_path / "out" / "rank0" / "graph0") == GRAPH_FILES

    def test_an_unwritable_folder_is_exit_code_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "f.py").write_text(
            "import torch\ndef make(): return torch.nn.Linear(3, 4), {'input': torch.ones(3)}\n"
        )
        (tmp_path / "file").write_text("")
        with pytest.raises(SystemExit) as exit_:
            cli.main(["dump", f"{tmp_path}/f.py:make", "-o", str(tmp_path / "file")])
        assert exit_.value.code == 2
        assert "cannot be written: File exists" in capsys.readouterr().err


@pytest.mark.hf
def test_tiny_minimax_m3(tmp_path: Path) -> None:
    from tiny_models import minimax_m3, tokens

    compile_and_run(minimax_m3("grouped_mm"), tokens(5), dump_dir=tmp_path)
    graph = tmp_path / "rank0" / "graph0"
    assert names(graph) == GRAPH_FILES
    for name in ("dynamo", "aten_before", "aten_after"):
        done = run_file(graph / f"{name}.py")
        assert done.returncode == 0, done.stderr
        assert set(re.findall(r"recorded output (\S+)", done.stdout)) == {"0.0e+00"}


def test_a_dump_is_not_imported_without_need() -> None:
    code = "import sys, moe_compile.backend; print([m for m in ('depyf', 'moe_compile.dump') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("inductor", [True, False])
def test_a_dump_draws_no_random_numbers(tmp_path: Path, inductor: bool) -> None:
    drawn = []
    for folder in (None, tmp_path / "dump"):
        torch.compiler.reset()
        torch.manual_seed(3)
        compile_and_run(TwoLayers(), dump_dir=folder, inductor=inductor)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_a_dump_with_verify_runs_too(tmp_path: Path) -> None:
    compile_and_run(TwoLayers(), dump_dir=tmp_path, inductor=False, verify=True)
    done = run_file(tmp_path / "rank0" / "graph0" / "aten_after.py")
    assert done.returncode == 0, done.stderr


def test_an_empty_folder_name_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["dump", "anything.py:make", "-o", ""])
    assert exit_.value.code == 2
    assert "dump_dir=''" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
