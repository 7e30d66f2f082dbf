"""DS instructions and scalar loads."""

from __future__ import annotations

from typing import Any

import numpy as np

from gfx950.formats import I64, LANES, MASK32, MASK64, U32, U64, sign_extend
from gfx950.operands import field
from gfx950.vector_memory import from_registers, to_registers, write_lanes
from gfx950.wave import EmuError, Execute, Wave

_LDS_SIZES = {"B8": 1, "U8": 1, "I8": 1, "B16": 2, "U16": 2, "I16": 2, "B32": 4, "B64": 8, "B96": 12, "B128": 16}


def build_lds(inst: Any, name: str) -> Execute:
    """DS instructions."""
    address, data0, data1, vdst, accumulator = (field(inst, k) for k in ("addr", "data0", "data1", "vdst", "acc"))
    offsets = field(inst, "offset0"), field(inst, "offset1")
    offset = offsets[0] | offsets[1] << 8
    if name in ("DS_BPERMUTE_B32", "DS_PERMUTE_B32", "DS_SWIZZLE_B32"):
        return _build_lane_permute(name, address, data0, vdst, offset)
    action, _, key = name.removeprefix("DS_").partition("_")
    size_name, d16, suffix = key.partition("_D16")
    if action not in ("READ", "READ2", "READ2ST64", "WRITE", "WRITE2", "WRITE2ST64") or size_name not in _LDS_SIZES:
        raise EmuError(name)
    count, half, sext = _LDS_SIZES[size_name], int(suffix == "_HI") if d16 else None, size_name.startswith("I")
    if action.endswith(("2", "2ST64")):
        unit = count * (64 if "ST64" in action else 1)
        starts = [unit * offsets[0], unit * offsets[1]]
    else:
        starts = [offset]

    def read(w: Wave) -> None:
        lanes, registers = w.active_lanes(), w.registers(accumulator)
        base = w.vgpr[address, lanes].astype(I64)
        parts = [to_registers(w.machine.lds_read(w, (base + start) & MASK32, count), sext) for start in starts]
        write_lanes(registers, vdst, lanes, np.concatenate(parts, 1), half)

    def write(w: Wave) -> None:
        lanes, registers = w.active_lanes(), w.registers(accumulator)
        base = w.vgpr[address, lanes].astype(I64)
        for start, reg in zip(starts, (data0, data1), strict=False):
            data = from_registers(registers, reg, lanes, count, half)
            w.machine.lds_write(w, (base + start) & MASK32, data)

    return read if action.startswith("READ") else write


def _build_lane_permute(name: str, address: int, data: int, vdst: int, offset: int) -> Execute:
    """DS instructions that only exchange lanes; an inactive lane gives 0."""

    def bpermute(w: Wave) -> None:
        source = ((w.vgpr[address].astype(I64) + offset) >> 2) & 63
        w.write_vgpr(vdst, np.where(w.active, w.vgpr[data], U32(0))[source].astype(U32))

    def permute(w: Wave) -> None:
        target = ((w.vgpr[address].astype(I64) + offset) >> 2) & 63
        result = np.zeros(64, U32)
        for lane in w.active_lanes():
            result[target[lane]] = w.vgpr[data, lane]
        w.write_vgpr(vdst, result)

    if offset & 0x8000:
        swizzled = (LANES & ~3) | (offset >> 2 * (LANES & 3) & 3)
    else:
        and_mask, or_mask, xor_mask = offset & 31, offset >> 5 & 31, offset >> 10 & 31
        swizzled = (LANES & 32) | ((LANES & 31 & and_mask | or_mask) ^ xor_mask)

    def swizzle(w: Wave) -> None:
        w.write_vgpr(vdst, np.where(w.active, w.vgpr[address], U32(0))[swizzled].astype(U32))

    return {"DS_BPERMUTE_B32": bpermute, "DS_PERMUTE_B32": permute, "DS_SWIZZLE_B32": swizzle}[name]


def build_scalar_memory(inst: Any, name: str) -> Execute:
    """Scalar loads; the cache instructions do nothing."""
    if name.startswith("S_DCACHE_"):
        return lambda w: None
    if not name.startswith(("S_LOAD_DWORD", "S_BUFFER_LOAD_DWORD")):
        raise EmuError(name)
    count = int(name.rpartition("DWORD")[2].removeprefix("X") or 1)
    base, dst, is_buffer = field(inst, "sbase") * 2, field(inst, "sdata"), "BUFFER" in name
    offset, offset_reg = 0, None
    if field(inst, "imm"):
        offset = sign_extend(field(inst, "offset"), 21)
    else:
        offset_reg = field(inst, "offset") & 127
    if field(inst, "soffset_en"):
        offset_reg = field(inst, "soffset")

    def execute(w: Wave) -> None:
        start = w.read_s64(base) & (0xFFFFFFFFFFFF if is_buffer else MASK64)
        address = (start + offset + (w.sgpr[offset_reg] if offset_reg is not None else 0)) & ~3
        data = w.machine.memory.load(np.array([address], U64), 4 * count, LANES[:1], "scalar load")
        w.sgpr[dst : dst + count] = data.reshape(-1).view(U32).tolist()

    return execute
