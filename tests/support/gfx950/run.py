"""Execute a kernel of a code object on numpy arrays."""

from __future__ import annotations

import mmap
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from gfx950.arguments import fill_kernarg, ordered_arguments, threads_per_workgroup, user_sgprs_of
from gfx950.buffers import address_of
from gfx950.code_object import PAGE
from gfx950.machine import Machine, Race
from gfx950.program import load_program


class RunStats(TypedDict):
    """What a run did."""

    kernel: str
    workgroups: int
    insts: int  # wave-instructions executed
    per_op: Counter[str]  # the same by opcode
    seconds: float
    races: list[Race]
    slack_ok: bool  # nothing was written to the accessible bytes around the buffers


def run_kernel(
    code_object: bytes,
    metadata: Any,
    grid: Sequence[int],
    args: Sequence[Any] | Mapping[str, Any],
    *,
    kernel: str | None = None,
    guard: bool = True,
    preload: bool = True,
    wg_filter: Callable[[int, int, int], bool] | None = None,
    strict: bool = False,
    races: bool = True,
    poison: bool = True,
    trace: Callable[..., None] | None = None,
) -> RunStats:
    """Execute every workgroup of a kernel, one after the other.

    code_object  compiled.asm["hsaco"] of Triton, or read_code_object(path)
    metadata     compiled.metadata of Triton or a dict with num_warps, shared (LDS bytes), name and optionally
                 signature {argument: type}; for other compilers {} or {"num_threads": n, "shared": bytes, "name": ...}
    grid         workgroups: (x,), (x, y) or (x, y, z)
    args         the arguments that are not constexprs: a list in order, or a dict by name (needs metadata's signature).
                 numpy array: a buffer, copied in before and copied back in place after the run; bytes: a struct by
                 value; int, float: a scalar; None: a null pointer.  Triton's trailing scratch pointers are added.
    kernel       which kernel of the code object (default: the one of the metadata, or the first)
    guard        put every buffer between inaccessible pages, and check the bytes around it after the run
    preload      emulate kernarg preloading; False runs the compatibility prologue instead
    wg_filter    (x, y, z) -> bool: run only these workgroups
    strict       vector-memory loads land only at the s_waitcnt that covers them: finds missing waits
    races        log LDS conflicts between waves inside one barrier interval
    poison       registers and LDS start as all-ones (NaN) instead of 0
    trace        called before every instruction with (workgroup, wave index, offset, decoded instruction, wave)

    Raises EmuError for an access out of bounds or an instruction that is not implemented.
    """
    settings = dict(metadata._asdict()) if hasattr(metadata, "_asdict") else dict(metadata)
    program = load_program(code_object)
    parsed = program.code_object
    name = kernel or settings.get("name") or next(iter(parsed.kernels))
    info, descriptor = parsed.kernels[name], parsed.descriptor(name)
    if descriptor.private_size:
        raise NotImplementedError(f"{name} uses scratch memory")
    if descriptor.flushes_fp32_denormals:
        raise NotImplementedError(f"{name} flushes fp32 denormals")
    threads = threads_per_workgroup(settings, info)
    lds_bytes = max(int(settings.get("shared", 0)), descriptor.group_size)
    size_x, size_y, size_z = (*grid, 1, 1)[:3]

    kernarg = mmap.mmap(-1, max(descriptor.kernarg_size, info.get(".kernarg_segment_size", 0)) + 2 * PAGE)
    explicit = [a for a in info[".args"] if not a[".value_kind"].startswith("hidden_")]
    values = ordered_arguments(settings, args, len(explicit), size_x * size_y * size_z)
    buffers = fill_kernarg(kernarg, explicit, values, guard)
    hidden = {
        "hidden_block_count_x": size_x,
        "hidden_block_count_y": size_y,
        "hidden_block_count_z": size_z,
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_grid_dims": 3,
        "hidden_dynamic_lds_size": lds_bytes,
    }
    for argument in info[".args"]:
        if argument[".value_kind"] in hidden:
            start, size = argument[".offset"], argument[".size"]
            kernarg[start : start + size] = hidden[argument[".value_kind"]].to_bytes(size, "little")
    packet = mmap.mmap(-1, PAGE)  # the dispatch packet, for kernels that read it
    sizes = (threads, 1, 1, 0, size_x * threads, size_y, size_z, descriptor.private_size, lds_bytes)
    packet[:64] = struct.pack("<HHHHHHIIIIIQQQQ", 0, 3, *sizes, 0, address_of(kernarg), 0, 0)

    user_sgprs = user_sgprs_of(descriptor, kernarg, packet, preload)
    entry = program.base + descriptor.entry + (256 if preload and descriptor.preload_length else 0)
    ranges = [
        *((buffer.address, buffer.address + buffer.size, f"buffer {i}") for i, buffer in enumerate(buffers)),
        (address_of(kernarg), address_of(kernarg) + len(kernarg), "kernarg"),
        (address_of(packet), address_of(packet) + 64, "dispatch packet"),
        (program.base, program.base + len(program.image), "image"),
    ]
    machine = Machine(program, ranges, lds_bytes, strict, races, trace)
    workgroups = [(x, y, z) for z in range(size_z) for y in range(size_y) for x in range(size_x)]
    if wg_filter is not None:
        workgroups = [workgroup for workgroup in workgroups if wg_filter(*workgroup)]
    started = time.perf_counter()
    for workgroup in workgroups:
        machine.run_workgroup(entry, workgroup, threads, user_sgprs, descriptor.rsrc2, descriptor.mode, poison)
    seconds = time.perf_counter() - started
    slack_ok = not guard or all(buffer.slack_is_untouched() for buffer in buffers)
    for buffer in buffers:
        buffer.copy_back()
    return {
        "kernel": name,
        "workgroups": len(workgroups),
        "insts": machine.executed.total(),
        "per_op": machine.executed,
        "seconds": seconds,
        "races": machine.race_log,
        "slack_ok": slack_ok,
    }
