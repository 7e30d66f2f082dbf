"""What ``moe-compile quantize`` is going to write, decided from the headers of a checkpoint, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from moe_compile.checkpoint_files import FLOATS, NewTensor, StoredTensor, read_header, read_json
from moe_compile.errors import CheckpointError
from moe_compile.kernels.mxfp8 import BLOCK_SIZE, scale_count

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SCALE_SUFFIX = "_scale_inv"

_PER_EXPERT = re.compile(r"(^|\.)experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$")
_FUSED = re.compile(r"(^|.*\.)experts\.(gate_up_proj|down_proj)$")
_OF_EXPERTS = re.compile(r"(^|\.)experts\.")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", INDEX)
# Everything but the experts modules themselves: also modules that transformers fuses from several stored weights, whose
# names a list of the stored ones would miss.
NOT_EXPERTS = r"(?!.*\.experts$).*"

# Models whose experts transformers' FP8Experts does not build or does not compute, by model_type.
_NOT_LOADABLE = {
    "aria": "its experts are transposed",
    "ernie4_5_vl_moe": "its experts have two intermediate sizes",
    "gpt_oss": "its experts have biases",
    "lfm2_moe": "its configuration names no activation",
    "muse_spark": "its experts have a norm after the down projection",
    "nemotron_h": "its experts have no gate, in another hidden size",
    "openai_privacy_filter": "its experts have biases",
    "step3p7": "its experts clamp after the activation",
}


@dataclass(frozen=True)
class Shard:
    """One weights file: its tensors, and those of them that are quantised."""

    name: str
    tensors: tuple[StoredTensor, ...]
    experts: frozenset[str]

    def in_new_order(self) -> Iterator[tuple[StoredTensor, tuple[NewTensor, ...]]]:
        """Each tensor with what it becomes. Wide elements come first, so that all are aligned as safetensors wants."""
        kept = [one for one in self.tensors if one.name not in self.experts]
        for one in sorted(kept, key=lambda one: -one.alignment):
            yield one, (NewTensor(one.name, one.dtype, one.shape, one.nbytes),)
        for one in self.tensors:
            if one.name in self.experts:
                *rows, k = one.shape
                count, scales = prod(rows), scale_count(k)
                yield (
                    one,
                    (
                        NewTensor(one.name, "F8_E4M3", one.shape, count * k),
                        NewTensor(one.name + SCALE_SUFFIX, "U8", (*rows, scales), count * scales),
                    ),
                )

    @property
    def new_tensors(self) -> list[NewTensor]:
        return [new for _, parts in self.in_new_order() for new in parts]


@dataclass(frozen=True)
class Plan:
    """Everything that is going to be written, known before the first byte."""

    source: Path
    destination: Path
    shards: tuple[Shard, ...]
    files: tuple[str, ...]
    config: dict[str, Any]
    index: dict[str, Any] | None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the marker holds: equal for two runs of the same, unchanged source."""
        stats = {shard.name: (self.source / shard.name).stat() for shard in self.shards}
        shards = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {"format": 1, "shards": shards, "config": self.config, "files": list(self.files)}


def make_plan(source: Path, destination: Path) -> Plan:
    """Look at the headers of ``source`` and decide what to write.

    Raises:
        CheckpointError: as :func:`quantize_checkpoint`, for what is wrong with the source.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder")
    if destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{destination} is {source} or lies inside of it; choose another folder to write to")
    config = read_json(source / CONFIG)
    _check_config(source, config)
    names, index = _shard_names(source)
    shards = []
    for name in names:
        tensors = read_header(source / name)
        shards.append(Shard(name, tensors, frozenset(t.name for t in tensors if _is_expert(t))))
    _check_experts(source, [t for s in shards for t in s.tensors], config)
    if index is not None:
        where = {new.name: s.name for s in shards for new in s.new_tensors}
        total = sum(new.nbytes for s in shards for new in s.new_tensors)
        index = {**index, "metadata": {**index.get("metadata", {}), "total_size": total}}
        index["weight_map"] = dict(sorted(where.items()))
    return Plan(source, destination, tuple(shards), _other_files(source), _new_config(config, shards), index)


def _shard_names(source: Path) -> tuple[list[str], dict[str, Any] | None]:
    """The weights files and the index, if there is one."""
    if (source / INDEX).exists():
        index = read_json(source / INDEX)
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (source / name).is_file()]
        if missing or not names:
            raise CheckpointError(f"{source}: the index names {', '.join(missing) or 'no file'}, which is not there")
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{source}: the index names files in other folders")
        return names, index
    found = sorted(path.name for path in source.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], None
    if len(found) == 1:
        return found, None
    what = f"{len(found)} safetensors files and no {INDEX}" if found else "no safetensors files"
    raise CheckpointError(f"{source} has {what}, so there is nothing to quantise")


def _check_config(source: Path, config: dict[str, Any]) -> None:
    for part in (config, config.get("text_config") or {}):
        quantization = part.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
            raise CheckpointError(f"{source} is quantised already (quant_method {method!r}); start from float weights")
        for model_type, why in _NOT_LOADABLE.items():
            if str(part.get("model_type", "")).startswith(model_type):
                raise CheckpointError(
                    f"{source}: transformers cannot load {part['model_type']} with FP8 experts ({why}); its float "
                    "checkpoint is packed to MXFP8 when it is loaded"
                )


def _is_expert(tensor: StoredTensor) -> bool:
    return bool(_PER_EXPERT.search(tensor.name) or _FUSED.match(tensor.name))


def _check_experts(source: Path, tensors: list[StoredTensor], config: dict[str, Any]) -> None:
    shapes = {one.name: one.shape for one in tensors}
    hidden = (config.get("text_config") or config).get("hidden_size")
    experts = [one for one in tensors if _is_expert(one)]
    for one in tensors:
        if one.dtype.startswith("F8") or one.name.endswith(("_scale_inv", "_scales", "_blocks")):
            raise CheckpointError(f"{source} is quantised already: {one.name} is {one.dtype}; start from float weights")
        if _OF_EXPERTS.search(one.name) and not _is_expert(one):
            raise CheckpointError(f"{source}: unknown expert layout: {one.name} {list(one.shape)}")
    if not experts:
        raise CheckpointError(
            f"{source} has no expert weights that this knows (experts.N.w1.weight, experts.down_proj)"
        )
    for one in experts:
        if one.dtype not in FLOATS:
            raise CheckpointError(f"{source}: {one.name} is {one.dtype}, expected one of {', '.join(FLOATS)}")
        if len(one.shape) != (3 if _FUSED.match(one.name) else 2) or 0 in one.shape:
            raise CheckpointError(f"{source}: unknown expert layout: {one.name} {list(one.shape)}")
        if one.shape[-1] % BLOCK_SIZE:
            raise CheckpointError(
                f"{source}: {one.name} {list(one.shape)} has {one.shape[-1]} columns; transformers reads MXFP8 only in "
                f"whole blocks of {BLOCK_SIZE}"
            )
        fused = _FUSED.match(one.name)
        if fused:
            gate_up, down = (shapes.get(f"{fused[1]}experts.{name}") for name in ("gate_up_proj", "down_proj"))
            _check_fused(source, one.name, gate_up, down, hidden)


def _check_fused(
    source: Path, name: str, gate_up: tuple[int, ...] | None, down: tuple[int, ...] | None, hidden: int | None
) -> None:
    """(E, 2I, H) and (E, H, I), not the transposed spelling, which would be quantised along the wrong dimension."""
    if gate_up is None or down is None or down[1] != hidden or gate_up != (down[0], 2 * down[2], hidden):
        raise CheckpointError(
            f"{source}: unknown expert layout: {name}: gate_up_proj {gate_up} and down_proj {down} are not (E, 2I, H) "
            f"and (E, H, I) with H = {hidden}"
        )


def _new_config(config: dict[str, Any], shards: list[Shard]) -> dict[str, Any]:
    # The stored names are for readers that compare names; transformers needs the pattern alone.
    linear = {
        t.name.removesuffix(".weight")
        for s in shards
        for t in s.tensors
        if t.name not in s.experts and t.name.endswith(".weight") and len(t.shape) == 2
    }
    quantization = {
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [NOT_EXPERTS, *sorted({*linear, "lm_head"})],
        "quant_method": "mxfp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [1, BLOCK_SIZE],
    }
    return {**config, "quantization_config": quantization}


def _other_files(source: Path) -> tuple[str, ...]:
    """Tokenizer, generation config and whatever else is no weights file, in folders too; nothing hidden."""
    found = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith(_WEIGHT_FILES) and str(relative) != CONFIG:
            found.append(str(relative))
    return tuple(found)
