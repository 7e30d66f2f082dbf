"""Kernel arguments: the kernarg segment, and the scalar registers that a wave starts with."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gfx950.buffers import DeviceBuffer, address_of
from gfx950.code_object import KernelDescriptor
from gfx950.formats import MASK32

_SCALAR_FORMATS = {
    "i1": "<B",
    "u1": "<B",
    "i8": "<b",
    "u8": "<B",
    "i16": "<h",
    "u16": "<H",
    "i32": "<i",
    "u32": "<I",
    "i64": "<q",
    "u64": "<Q",
    "fp32": "<f",
    "f32": "<f",
    "fp64": "<d",
    "f64": "<d",
}


def _pack_scalar(value: float, size: int, kind: str | None) -> bytes:
    by_size = {4: "<f", 8: "<d"} if isinstance(value, float) else {1: "<b", 2: "<h", 4: "<i", 8: "<q"}
    return struct.pack(_SCALAR_FORMATS.get(kind or "") or by_size[size], value)[:size]


def ordered_arguments(
    settings: Mapping[str, Any], args: Sequence[Any] | Mapping[str, Any], wanted: int, workgroups: int
) -> list[tuple[Any, str | None]]:
    """(value, type or None) of every argument in order, Triton's scratch pointers included."""
    live = {name: kind for name, kind in (settings.get("signature") or {}).items() if kind != "constexpr"}
    values = [args[name] for name in live] if isinstance(args, Mapping) else list(args)
    given = len(values)
    for which in ("global_scratch_size", "profile_scratch_size")[: max(wanted - given, 0)]:
        size = int(settings.get(which, 0) or 0) * workgroups
        values.append(np.zeros(size, np.uint8) if size else None)
    if len(values) != wanted:
        raise ValueError(f"{given} arguments given, the code object has {wanted}")
    kinds: list[str | None] = [*live.values()][:given]
    return list(zip(values, kinds + [None] * (len(values) - len(kinds)), strict=True))


def fill_kernarg(
    kernarg: mmap.mmap,
    explicit: Sequence[Mapping[str, Any]],
    values: Sequence[tuple[Any, str | None]],
    guard: bool,
) -> list[DeviceBuffer]:
    """Write the explicit arguments to the kernarg segment; the buffers made for the arrays (one per array)."""
    buffers: dict[int, DeviceBuffer] = {}
    for argument, (value, kind) in zip(explicit, values, strict=True):
        start, size = argument[".offset"], argument[".size"]
        if value is None:
            packed = bytes(size)
        elif isinstance(value, bytes | bytearray):
            packed = bytes(value).ljust(size, b"\0")[:size]
        elif isinstance(value, np.ndarray):
            if id(value) not in buffers:
                buffers[id(value)] = DeviceBuffer(value, guard)
            packed = struct.pack("<Q", buffers[id(value)].address)
        else:
            packed = _pack_scalar(value, size, kind)
        kernarg[start : start + len(packed)] = packed
    return list(buffers.values())


def user_sgprs_of(descriptor: KernelDescriptor, kernarg: mmap.mmap, packet: mmap.mmap, preload: bool) -> list[int]:
    """The user SGPRs in the order of the amdhsa ABI; those that nothing sets hold garbage."""
    sources = [  # (registers, value) by bit of the properties
        (4, 0),  # private segment buffer
        (2, address_of(packet)),
        (2, 0),  # queue
        (2, address_of(kernarg)),
        (2, 0),  # dispatch id
        (2, 0),  # flat scratch
        (1, descriptor.private_size),
    ]
    sgprs = []
    for bit, (count, value) in enumerate(sources):
        if descriptor.properties >> bit & 1:
            sgprs += [(value >> (32 * i)) & MASK32 for i in range(count)]
    if preload and descriptor.preload_length:
        start = 4 * descriptor.preload_offset
        sgprs += struct.unpack_from(f"<{descriptor.preload_length}I", kernarg, start)
    return sgprs + [0xDEADBEEF] * ((descriptor.rsrc2 >> 1 & 0x1F) - len(sgprs))


def threads_per_workgroup(metadata: Mapping[str, Any], kernel: Mapping[str, Any]) -> int:
    if "num_threads" in metadata:
        return metadata["num_threads"]
    if "num_warps" in metadata:
        return metadata["num_warps"] * metadata.get("warp_size", 64)
    sizes = kernel[".reqd_workgroup_size"]
    if max(sizes[1:]) > 1:
        raise NotImplementedError(f"workgroup of {sizes} threads: only one dimension is supported")
    return math.prod(sizes)
