"""safetensors files read and written in place, and files that appear whole or not at all.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range), and the tensors'
bytes. Reading and writing it here, tensor by tensor, keeps memory at one matrix and makes the bytes a function of the
input alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from moe_compile.errors import CheckpointError

PARTIAL = ".partial"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16}
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: ``start`` and ``end`` count bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def alignment(self) -> int:
        return _ITEM_BITS.get(self.dtype, 8)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: the file is no whole safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} is not a whole safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON") from None
    header.pop("__metadata__", None)
    found = [
        StoredTensor(name, one["dtype"], tuple(one["shape"]), *(8 + length + offset for offset in one["data_offsets"]))
        for name, one in header.items()
    ]
    found.sort(key=lambda one: (one.start, one.name))
    if found and max(one.end for one in found) != size:
        raise CheckpointError(f"{path} is {size} bytes, its header says {max(one.end for one in found)}: it is cut off")
    return tuple(found)


def header_bytes(tensors: Iterable[NewTensor]) -> bytes:
    """The start of a safetensors file whose tensors lie one after the other in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for one in tensors:
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.nbytes],
        }
        offset += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_bytes(source: IO[bytes], start: int, end: int, target: IO[bytes]) -> None:
    source.seek(start)
    left = end - start
    while left:
        chunk = source.read(min(left, _CHUNK))
        if not chunk:
            raise CheckpointError(f"{source.name} ended while it was read: it was changed or cut off")
        target.write(chunk)
        left -= len(chunk)


def matrices(source: IO[bytes], tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """The last two dimensions of a float tensor, one matrix at a time."""
    dtype = FLOATS[tensor.dtype]
    shape = tensor.shape[-2:]
    nbytes = prod(shape) * dtype.itemsize
    for start in range(tensor.start, tensor.end, nbytes):
        source.seek(start)
        data = bytearray(source.read(nbytes))
        if len(data) != nbytes:
            raise CheckpointError(f"{source.name} ended while it was read: it was changed or cut off")
        yield torch.frombuffer(data, dtype=dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a one-byte tensor."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under ``path`` only when all of it is on disk: written beside, synced, renamed."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: the file is missing or holds something else than a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found
