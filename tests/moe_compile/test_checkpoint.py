"""``moe-compile quantize``: the right bytes, what transformers makes of them, interruptions and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_compile import checkpoint, checkpoint_files
from moe_compile.checkpoint import MARKER, quantize_checkpoint
from moe_compile.checkpoint_files import NewTensor, header_bytes, read_header
from moe_compile.cli import main
from moe_compile.errors import CheckpointError
from moe_compile.kernels.mxfp8 import quantize

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 2
CONFIG = {"model_type": "mixtral", "hidden_size": HIDDEN, "architectures": ["MixtralForCausalLM"]}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
Tensors = dict[str, torch.Tensor]


def write_safetensors(path: Path, tensors: Tensors) -> None:
    new = [NewTensor(name, NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()]
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values())
    path.write_bytes(header_bytes(new) + data)


def per_expert(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    prefix = "model.layers.0.block_sparse_moe."
    tensors: Tensors = {"model.embed_tokens.weight": torch.randn(7, HIDDEN, generator=generator).to(dtype)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors[prefix + "gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=generator).to(dtype)
    tensors[prefix + "shared_experts.w1.weight"] = torch.randn(8, HIDDEN, generator=generator).to(dtype)
    tensors["model.odd"] = torch.arange(3, dtype=torch.uint8)
    for expert in range(EXPERTS):
        for name, rows, columns in (
            ("w1", INTERMEDIATE, HIDDEN),
            ("w2", HIDDEN, INTERMEDIATE),
            ("w3", INTERMEDIATE, HIDDEN),
        ):
            weight = torch.randn(rows, columns, generator=generator) * 10.0 ** (expert - 3)
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = weight.to(dtype)
    return tensors


def fused(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    prefix = "model.layers.0.mlp.experts."
    return {
        prefix + "gate_up_proj": torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator).to(dtype),
        prefix + "down_proj": torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).to(dtype),
        "lm_head.weight": torch.randn(7, HIDDEN, generator=generator).to(dtype),
    }


def write_source(folder: Path, tensors: Tensors, shards: int = 3, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint; without an index if there is one shard."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"tokens": ["ä"]}')
    (folder / "assets").mkdir()
    (folder / "assets" / "template.jinja").write_text("{{ x }}")
    (folder / "pytorch_model.bin").write_bytes(b"not to be copied")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "hidden").write_text("not to be copied")
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total, "total_parameters": 5}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def load(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [per_expert, fused])
@pytest.mark.parametrize("shards", [1, 3])
def test_expert_weights_become_mxfp8_and_the_rest_is_copied(
    tmp_path: Path, make: Callable[[torch.dtype], Tensors], dtype: torch.dtype, shards: int
) -> None:
    pytest.importorskip("safetensors")
    tensors = make(dtype)
    source = write_source(tmp_path / "source", tensors, shards)
    summary = quantize_checkpoint(source, tmp_path / "out")
    found = load(tmp_path / "out")
    experts = {name for name in tensors if ".experts." in name}
    assert found.keys() == tensors.keys() | {name + "_scale_inv" for name in experts}
    for name, weight in tensors.items():
        if name in experts:
            values, scales = quantize(weight)
            assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8)), name
            assert torch.equal(found[name + "_scale_inv"], scales), name
        else:
            assert found[name].dtype == weight.dtype
            assert torch.equal(found[name], weight), name
    assert (summary.quantised, summary.shards, summary.resumed) == (len(experts), shards, 0)
    assert summary.bytes_after == sum(t.numel() * t.element_size() for t in found.values())


def test_config_index_and_other_files(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", per_expert())
    out = tmp_path / "out"
    quantize_checkpoint(source, out)
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    skipped = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "activation_scheme": "dynamic",
        "quant_method": "mxfp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [1, 32],
    }
    assert "model.layers.0.block_sparse_moe.gate" in skipped
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == 5
    tensors = {t.name: (file.name, t.nbytes) for file in out.glob("*.safetensors") for t in read_header(file)}
    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(nbytes for _, nbytes in tensors.values())
    assert digests(out).keys() - {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)} == {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        os.path.join("assets", "template.jinja"),
    }
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    quantize_checkpoint(write_source(tmp_path / "source", per_expert(), 1), tmp_path / "out")
    for tensor in read_header(tmp_path / "out" / "model.safetensors"):
        assert tensor.start % (tensor.alignment // 8) == 0, tensor


def test_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", per_expert())
    for name in ("a", "b"):
        quantize_checkpoint(source, tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def steps(monkeypatch: pytest.MonkeyPatch, fatal: int) -> Callable[[], int]:
    """Die at the ``fatal``-th step that changes something on disk; returns a count of the steps taken."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        if taken == fatal:
            raise Killed

    def dying(call: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not after:
                step()
            result = call(*args, **kwargs)
            if after:
                step()
            return result

        return wrapped

    monkeypatch.setattr(os, "replace", dying(dying(os.replace, after=True), after=False))
    monkeypatch.setattr(os, "fsync", dying(os.fsync, after=False))
    monkeypatch.setattr(Path, "mkdir", dying(Path.mkdir, after=True))
    monkeypatch.setattr(Path, "unlink", dying(dying(Path.unlink, after=True), after=False))
    for module in (checkpoint, checkpoint_files):
        for name in ("quantize", "copy_bytes", "header_bytes"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, dying(getattr(module, name), after=True))
    return lambda: taken


def test_killed_at_any_step_a_second_run_completes_it(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", {**per_expert(), **fused()}, 2)
    quantize_checkpoint(source, tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    fatal, resumed = 1, 0
    while True:
        out = tmp_path / f"out{fatal}"
        with pytest.MonkeyPatch.context() as patch:
            steps(patch, fatal)
            try:
                quantize_checkpoint(source, out)
            except Killed:
                pass
            else:
                break
        if not (out.exists() and digests(out) == expected):  # it may have died after its last change
            assert not out.exists() or (out / MARKER).exists() or digests(out).keys() <= {MARKER + ".partial"}
            resumed += quantize_checkpoint(source, out).resumed
        assert digests(out) == expected, f"killed at step {fatal}"
        shutil.rmtree(out)
        fatal += 1
    assert fatal > 30
    assert resumed > 10, "finished shards are taken over"


def test_killed_twice(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", per_expert())
    quantize_checkpoint(source, tmp_path / "whole")
    for fatal in (9, 9, 9, 9):
        with pytest.MonkeyPatch.context() as patch:
            steps(patch, fatal)
            with pytest.raises(Killed):
                quantize_checkpoint(source, tmp_path / "out")
    quantize_checkpoint(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_damaged_shard_of_an_unfinished_run_is_written_again(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "source", per_expert()), tmp_path / "out"
    quantize_checkpoint(source, out)
    expected = digests(out)
    checkpoint_files.write_json(out / MARKER, checkpoint.make_plan(source, out).fingerprint)
    shard = out / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    assert quantize_checkpoint(source, out).resumed == 2
    assert digests(out) == expected


def prepared(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_progress_counts_the_bytes_read(tmp_path: Path) -> None:
    tensors = per_expert()
    seen: list[tuple[int, int, str]] = []
    quantize_checkpoint(
        write_source(tmp_path / "source", tensors),
        tmp_path / "out",
        lambda done, total, name: seen.append((done, total, name)),
    )
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert seen[-1] == (total, total, "model-00003-of-00003.safetensors")
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(source: Path) -> None:
        (source / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    return edit


def replace_weights(tensors: Callable[[], Tensors]) -> Callable[[Path], None]:
    def edit(source: Path) -> None:
        (source / "model.safetensors").unlink()
        write_safetensors(source / "model.safetensors", tensors())

    return edit


def transposed() -> Tensors:
    return {name: t.transpose(-1, -2).contiguous() if t.dim() == 3 else t for name, t in fused().items()}


def cut_off(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda source: (source / "config.json").unlink(), "config.json does not exist"),
    "broken config": (lambda source: (source / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no weights": (lambda source: (source / "model.safetensors").unlink(), "has no safetensors files"),
    "quantised": (edit_config(quantization_config={"quant_method": "fp8"}), "quantised already .*'fp8'"),
    "quantised text model": (
        edit_config(text_config={"quantization_config": {"quant_method": "mxfp8"}}),
        "quantised already .*'mxfp8'",
    ),
    "scales": (
        replace_weights(lambda: {**per_expert(), "x.experts.0.w1.weight_scale_inv": torch.ones(1)}),
        "quantised already: x.experts.0.w1.weight_scale_inv",
    ),
    "not loadable": (
        edit_config(model_type="gpt_oss"),
        "cannot load gpt_oss with FP8 experts .its experts have biases",
    ),
    "no experts": (replace_weights(lambda: {"a.weight": torch.ones(2, 2)}), "has no expert weights"),
    "bias": (
        replace_weights(lambda: {**per_expert(), "x.experts.0.w1.bias": torch.ones(2)}),
        "unknown expert layout: x.experts.0.w1.bias",
    ),
    "transposed": (replace_weights(transposed), r"gate_up_proj \(2, 64, 64\) and down_proj \(2, 32, 64\) are not"),
    "half of a pair": (
        replace_weights(lambda: {name: t for name, t in fused().items() if "down" not in name}),
        "down_proj None",
    ),
    "ragged": (
        replace_weights(lambda: {"x.experts.0.w1.weight": torch.ones(4, 40)}),
        "has 40 columns.*whole blocks of 32",
    ),
    "integers": (
        replace_weights(lambda: {"x.experts.0.w1.weight": torch.ones(4, 32, dtype=torch.int64)}),
        "w1.weight is I64, expected one of F32, F16, BF16",
    ),
    "cut off": (cut_off, "it is cut off"),
    "not safetensors": (
        lambda source: (source / "model.safetensors").write_bytes(b"x" * 99),
        "not a whole safetensors",
    ),
    "no folder": (shutil.rmtree, "is not a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_sources(tmp_path: Path, name: str) -> None:
    break_it, reason = REFUSED[name]
    source = write_source(tmp_path / "source", per_expert(), 1)
    break_it(source)
    with pytest.raises(CheckpointError, match=reason) as caught:
        quantize_checkpoint(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_shard(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", per_expert())
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the index names model-00002-of-00003.safetensors, which is not there"):
        quantize_checkpoint(source, tmp_path / "out")


def test_refused_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source", per_expert())
    for inside in (source, source / "out"):
        with pytest.raises(CheckpointError, match="lies inside of it"):
            quantize_checkpoint(source, inside)
    full = prepared(tmp_path / "full")
    (full / "precious.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty and holds no unfinished run"):
        quantize_checkpoint(source, full)
    assert digests(full).keys() == {"precious.txt"}
    with pytest.raises(CheckpointError, match="is a file"):
        quantize_checkpoint(source, full / "precious.txt")
    quantize_checkpoint(source, tmp_path / "done")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "done")

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(CheckpointError, match=r"needs 0.0 GB more, the disk has 0.0 GB free"):
        quantize_checkpoint(source, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_an_unfinished_run_of_another_source_is_not_continued(tmp_path: Path) -> None:
    first = write_source(tmp_path / "first", per_expert())
    second = write_source(tmp_path / "second", fused())
    with pytest.MonkeyPatch.context() as patch:
        steps(patch, 12)
        with pytest.raises(Killed):
            quantize_checkpoint(first, tmp_path / "out")
    with pytest.raises(CheckpointError, match="unfinished run of another or a changed source"):
        quantize_checkpoint(second, tmp_path / "out")
    os.utime(first / "model-00001-of-00003.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="unfinished run of another or a changed source"):
        quantize_checkpoint(first, tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "source", per_expert())
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(source), str(tmp_path / "out")])
    assert stopped.value.code == 0
    assert "6 expert weights in 3 files" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(source), str(tmp_path / "out")])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("moe-compile: ")
    assert "is not empty" in line


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "source", per_expert())

    def interrupt(matrix: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "quantize", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(source), str(tmp_path / "out")])
    assert stopped.value.code == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err


FAMILIES: dict[str, dict[str, int]] = {
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 64},
    "deepseek_v4": {"moe_intermediate_size": 64},
    "glm4_moe": {"moe_intermediate_size": 64},
    "olmoe": {"intermediate_size": 64},
}


@pytest.fixture
def loads_fp8_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps FP8 weights on GPUs alone, and asks for the package accelerate: its check is left out."""
    import moe_compile

    quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
    moe_compile.register_hf_experts()


@pytest.mark.hf
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_transformers(tmp_path: Path, family: str, loads_fp8_on_a_cpu: None) -> None:
    """The loaded checkpoint gives the very logits of the float model that is quantised in memory."""
    import tiny_hf_models as tiny

    model = tiny.build(family, "moe_rocm", **FAMILIES[family])
    model.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    loaded, info = tiny.model_class(family).from_pretrained(
        tmp_path / "out", experts_implementation="moe_rocm", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = tiny.tokens(7)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(loaded(ids, use_cache=False).logits, expected)
        compiled = torch.compile(loaded, backend="moe_rocm", options={"inductor": False})
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    experts = [m for m in loaded.modules() if type(m).__name__.startswith("FP8")]
    assert {type(m).__name__ for m in experts} == {"FP8Experts"}
    assert experts[0].gate_up_proj.dtype == torch.float8_e4m3fn


@pytest.mark.hf
def test_a_checkpoint_whose_scales_are_missing_is_refused(tmp_path: Path, loads_fp8_on_a_cpu: None) -> None:
    import tiny_hf_models as tiny
    from safetensors.torch import load_file, save_file

    from moe_compile.errors import UnsupportedExperts

    tiny.build("mixtral").save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    kept = {name: t for name, t in load_file(path).items() if not name.endswith("w2.weight_scale_inv")}
    save_file(kept, path, metadata={"format": "pt"})
    loaded = tiny.model_class("mixtral").from_pretrained(tmp_path / "out", experts_implementation="moe_rocm")
    with torch.no_grad(), pytest.raises(UnsupportedExperts, match="down_proj_scale_inv is missing in the checkpoint"):
        loaded(tiny.tokens(3), use_cache=False)
