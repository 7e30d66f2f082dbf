"""A Hugging Face folder as FACTORY."""

import json
from pathlib import Path

import pytest
import torch

from moe_compile import cli
from moe_compile.errors import FactoryError
from moe_compile.factory import load_model_call
from moe_compile.hf_factory import cut, is_hf_name

pytestmark = pytest.mark.hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a MiniMax-M3 with one dense and five MoE layers."""
    from tiny_models import minimax_m3

    kinds = ["dense"] + ["sparse"] * 5
    model = minimax_m3("grouped_mm", num_hidden_layers=6, mlp_layer_types=kinds)
    path = tmp_path_factory.mktemp("hf") / "m3"
    model.config.save_pretrained(path)
    return path


def test_random_weights_keep_the_widths_and_cut_the_layers(folder: Path) -> None:
    call = load_model_call(str(folder), random_weights=True)
    assert isinstance(call.model, torch.nn.Module)
    config = call.model.config
    assert (config.num_hidden_layers, config.mlp_layer_types) == (3, ["dense", "sparse", "sparse"])
    assert (config.hidden_size, config.num_local_experts) == (64, 8)
    assert {parameter.dtype for parameter in call.model.parameters()} == {torch.bfloat16}
    assert tuple(call.kwargs["input_ids"].shape) == (1, 16)


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["explain", str(folder), "--random-weights", "--no-inductor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 0
    assert [layer["name"] for layer in found["layers"]] == [f"model.layers.{i}.mlp.experts" for i in (1, 2)]


def test_stored_weights(tmp_path: Path) -> None:
    from tiny_models import minimax_m2

    model = minimax_m2("grouped_mm")
    model.save_pretrained(tmp_path)
    call = load_model_call(str(tmp_path))
    stored = dict(call.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[name], parameter)


@pytest.mark.parametrize(
    ("name", "random_weights", "message"),
    [
        ("{folder}", False, "no weights found .*--random-weights"),
        ("{empty}", True, "holds no config.json"),
        ("nobody/nothing", True, "is no configuration on this disk"),
        ("file.py:make", True, "--random-weights is for a Hugging Face folder"),
    ],
)
def test_errors(folder: Path, tmp_path: Path, name: str, random_weights: bool, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        load_model_call(name.format(folder=folder, empty=tmp_path), random_weights)


@pytest.mark.parametrize(
    ("factory", "expected"),
    [("MiniMaxAI/MiniMax-M2", True), ("file.py:make", False), ("a/b.py", False), ("x.y:z", False), ("bogus", False)],
)
def test_what_is_taken_for_a_name(factory: str, expected: bool) -> None:
    assert is_hf_name(factory) is expected


def test_a_model_without_dense_layers() -> None:
    from transformers import MiniMaxM2Config

    config = MiniMaxM2Config(num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2)
    assert cut(config).num_hidden_layers == 2
