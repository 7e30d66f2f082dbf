"""A model with one mistake in its MoE is diagnosed from what ``moe-compile explain`` prints, and from nothing else."""

import json
import re
from pathlib import Path

import pytest

from moe_compile import cli

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "import dump_models, moe_modules\n"
        "def call(second=dump_models.Experts):\n"
        "    return dump_models.TwoLayers(second), {'x': moe_modules.hidden_states()}\n"
        "def right(): return call()\n"
        "def swapped(): return call(dump_models.SwappedExperts)\n"
        "def dropout(): return call(dump_models.DropoutExperts)\n"
        "def hooked():\n"
        "    model, inputs = call()\n"
        "    def report_norm(module, args, output): print('norm', output.norm().item())\n"
        "    model.layers[0].experts.register_forward_hook(report_norm)\n"
        "    return model, inputs\n"
        "class Printing(dump_models.Experts):\n"
        "    def gate(self, gate_up):\n"
        "        print('largest', gate_up.max().item())\n"
        "        return super().gate(gate_up)\n"
        "def printing(): return call(Printing)\n"
        "def leaking():\n"
        "    model, inputs = call()\n"
        "    experts = model.layers[1].experts\n"
        "    kept = experts.gate\n"
        "    def gate(gate_up):\n"
        "        experts.last = kept(gate_up)\n"
        "        return experts.last\n"
        "    experts.gate = gate\n"
        "    return model, inputs\n"
    )
    return str(tmp_path / "models.py")


def explain(capsys: pytest.CaptureFixture[str], factory: str, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["explain", factory, "--no-inductor", *arguments])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, capsys.readouterr().out


def row(text: str, layer: str) -> str:
    return next(line for line in text.splitlines() if f" {layer} " in line and "│" in line)


def test_nothing_is_said_of_a_right_model(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    code, text = explain(capsys, f"{factory}:right")
    assert code == 0
    for word in ("left alone", "up rows first", "graph break", "remedy"):
        assert word not in text
    assert re.search(
        r"^1 graph, 0 recompiles; packed weights: 5\d KiB; \d+\.\d s, \d\.\d\d s of them in the pass$", text, re.M
    )


def test_gate_and_up_swapped_in_one_layer(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    code, text = explain(capsys, f"{factory}:swapped")
    assert code == 0
    assert "up rows first" in row(text, "layers.1.experts")
    assert "up rows first" not in row(text, "layers.0.experts")


def test_an_extra_dropout(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    code, text = explain(capsys, f"{factory}:dropout")
    assert code == 0
    assert "left alone" in row(text, "layers.1.experts")
    assert "reference" in row(text, "layers.0.experts")
    assert re.search(r"layers\.1\.experts: left alone: .*dropout.* is not a pointwise operator", text)
    assert re.search(r"at dump_models\.py:\d+ in gate: return nn\.functional\.dropout\(", text)
    assert "remedy: switch the dropout off: model.eval(), or p=0" in text
    code, _ = explain(capsys, f"{factory}:dropout", "--strict")
    assert code == 1


def test_a_hook_that_breaks_the_graph(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    _, text = explain(capsys, f"{factory}:hooked")
    for layer in ("layers.0.experts", "layers.1.experts"):  # one graph serves both
        assert "reference" in row(text, layer)
    assert "2/2 expert blocks" in text
    text = " ".join(text.split())
    assert re.search(r"note: \d graph breaks? left \d graphs? of the model: .*Tensor\.item\(\)", text)
    assert re.search(r"in a loop of forward \(dump_models\.py:\d+\), which runs uncompiled", text)
    assert re.search(
        r"at models\.py:\d+ in report_norm: def .*output\.norm\(\)\.item\(\)\) "
        r"\(the hook report_norm of layers\.0\.experts\)",
        text,
    )
    assert 'TORCH_LOGS="graph_breaks" shows the tracebacks' in text


def test_a_graph_break_inside_of_the_experts(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    code, text = explain(capsys, f"{factory}:printing")
    assert code == 0
    assert "1/2 expert blocks" in text
    assert "reference" in row(text, "layers.0.experts")
    assert "left alone" in row(text, "layers.1.experts")
    assert "layers.1.experts: left alone: a graph break inside of the experts leaves their parts" in text
    assert text.count("left alone: ") == 1
    place = r"at models\.py:\d+ in gate: print\('largest', gate_up\.max\(\)\.item\(\)\)"
    assert len(re.findall(place, text)) == 2, "of the block, and in the note"
    assert "remedy: remove the graph break: " in text
    assert "pointwise" not in text


def test_a_value_that_is_kept_from_inside_the_experts(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    _, text = explain(capsys, f"{factory}:leaking")
    assert re.search(r"layers\.1\.experts: left alone: the intermediate value \w+ is used outside the block", text)
    assert "remedy: do not read values from inside the experts" in text


def test_the_same_in_json(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    _, text = explain(capsys, f"{factory}:dropout", "--json")
    found = json.loads(text)
    assert [layer["remedy"] for layer in found["layers"]] == [None, "switch the dropout off: model.eval(), or p=0"]
    assert found["packed_bytes"] > 0
    assert found["total_seconds"] > found["seconds"]
    assert found["recompiles"] == 0
