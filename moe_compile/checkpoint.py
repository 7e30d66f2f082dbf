"""``moe-compile quantize``: a float safetensors checkpoint with its expert weights in MXFP8, as transformers loads it.

Names stay those of the source, so transformers' own conversion of a model's names applies: the scales of
``experts.3.w1.weight`` are ``experts.3.w1.weight_scale_inv``, those of a fused ``experts.gate_up_proj`` are
``experts.gate_up_proj_scale_inv`` (E8M0 bytes, uint8). ``config.json`` gets ``quant_method: mxfp8``, blocks of [1, 32]
and ``scale_fmt: ue8m0``. Every other tensor is copied byte by byte.

The work survives an interruption at any moment. A marker file says whose folder it is, every file appears whole or not
at all, and a second run takes up what is missing. The index comes last and then the marker goes, so a folder without
marker is complete. The bytes depend on the source alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moe_compile.checkpoint_files import (
    PARTIAL,
    copy_bytes,
    header_bytes,
    matrices,
    raw,
    read_header,
    read_json,
    sync_folder,
    whole_file,
    write_json,
)
from moe_compile.checkpoint_plan import CONFIG, INDEX, Plan, Shard, make_plan
from moe_compile.errors import CheckpointError
from moe_compile.kernels.mxfp8 import quantize

MARKER = ".moe_compile_quantize.json"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Summary:
    """What was done; sizes in bytes of tensors, ``resumed`` counts shards that an earlier run had finished."""

    shards: int
    resumed: int
    quantised: int
    bytes_before: int
    bytes_after: int


def quantize_checkpoint(source: Path, destination: Path, progress: Progress | None = None) -> Summary:
    """Write ``source`` with MXFP8 experts to ``destination``, or finish an earlier such run.

    Args:
        source: a folder with config.json and safetensors files in float32, bfloat16 or float16.
        destination: a folder that is empty, absent or an unfinished run of the same source.
        progress: called with (bytes read, bytes in all, file name).

    Raises:
        CheckpointError (a ValueError): the source is not one that this can quantise, or the destination is not ours, or
            the disk is too small. Nothing was written then.
    """
    plan = make_plan(source, destination)
    report: Progress = progress or (lambda done, total, name: None)
    resume = _claim(plan)
    done, total, resumed = 0, sum(t.nbytes for s in plan.shards for t in s.tensors), 0
    for shard in plan.shards:
        target = destination / shard.name
        if resume and _is_finished(target, shard):
            resumed += 1
            done += sum(t.nbytes for t in shard.tensors)
            report(done, total, shard.name)
            continue
        with (source / shard.name).open("rb") as file, whole_file(target) as out:
            for nbytes in _write_shard(shard, file, out):
                done += nbytes
                report(done, total, shard.name)
    for name in plan.files:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        with (source / name).open("rb") as file, whole_file(destination / name) as out:
            shutil.copyfileobj(file, out)
    write_json(destination / CONFIG, plan.config)
    if plan.index is not None:
        write_json(destination / INDEX, plan.index)
    (destination / MARKER).unlink()
    sync_folder(destination)
    return Summary(
        shards=len(plan.shards),
        resumed=resumed,
        quantised=sum(len(s.experts) for s in plan.shards),
        bytes_before=total,
        bytes_after=sum(t.nbytes for s in plan.shards for t in s.new_tensors),
    )


def _write_shard(shard: Shard, source: IO[bytes], out: IO[bytes]) -> Iterator[int]:
    """Write one file; yields the bytes read after each matrix or tensor."""
    out.write(header_bytes(shard.new_tensors))
    for tensor, _ in shard.in_new_order():
        if tensor.name not in shard.experts:
            copy_bytes(source, tensor.start, tensor.end, out)
            yield tensor.nbytes
            continue
        scales = []
        for matrix in matrices(source, tensor):
            values, matrix_scales = quantize(matrix)
            out.write(raw(values))
            scales.append(raw(matrix_scales))
            yield matrix.nbytes
        out.write(b"".join(scales))


def _claim(plan: Plan) -> bool:
    """Make the destination ours; True if it was already, from an unfinished run of the same source.

    Raises:
        CheckpointError: it holds something else, or the disk is too small.
    """
    destination = plan.destination
    marker = destination / MARKER
    existing = [path.name for path in destination.iterdir()] if destination.is_dir() else []
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file, not a folder")
    resume = marker.exists()
    if resume and read_json(marker) != plan.fingerprint:
        raise CheckpointError(f"{destination} holds an unfinished run of another or a changed source; delete it first")
    if not resume and set(existing) - {MARKER + PARTIAL}:
        raise CheckpointError(f"{destination} is not empty and holds no unfinished run of this command")
    needed = sum(
        sum(t.nbytes for t in shard.new_tensors)
        for shard in plan.shards
        if not (resume and _is_finished(destination / shard.name, shard))
    ) + sum((plan.source / name).stat().st_size for name in plan.files)
    folder = next(path for path in (destination, *destination.resolve().parents) if path.exists())
    for partial in destination.glob("*" + PARTIAL) if resume else ():
        partial.unlink()
    free = shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB more, the disk has {free / 1e9:.1f} GB free"
        raise CheckpointError(f"{destination} needs {sizes}")
    if not resume:
        destination.mkdir(parents=True, exist_ok=True)
        write_json(marker, plan.fingerprint)
    return resume


def _is_finished(path: Path, shard: Shard) -> bool:
    """Whether an earlier run wrote this file: it has its final name, and the tensors that it should have."""
    if not path.is_file():
        return False
    try:
        found = read_header(path)
    except CheckpointError:
        return False
    expected = [(t.name, t.dtype, t.shape, t.nbytes) for t in shard.new_tensors]
    return [(t.name, t.dtype, t.shape, t.nbytes) for t in found] == expected
