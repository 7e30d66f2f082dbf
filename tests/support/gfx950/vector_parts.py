"""SDWA (parts of registers) and DPP (the lanes of neighbours)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gfx950.formats import F32, I32, LANES, MASK32, U16, U32, lanes_to_mask, mask_to_lanes
from gfx950.operands import TYPES, field, vector_source
from gfx950.vector_flags import parse_compare
from gfx950.vector_table import OPERATIONS
from gfx950.wave import VCC, VGPR0, EmuError, Execute, VectorSource, Wave


def _sdwa_part(select: int) -> tuple[int, int]:
    """(width, shift) of the part of a register that an SDWA select below 6 names."""
    return (8, 8 * select) if select < 4 else (16, 16 * (select - 4))


def _sdwa_source(inst: Any, i: int, kind: str) -> VectorSource:
    bits, dtype = TYPES[kind]
    if bits == 64:
        raise EmuError("SDWA of 64-bit operands")
    code, select = field(inst, f"vsrc{i}"), field(inst, f"src{i}_sel")
    sext, neg, absolute = (field(inst, f"src{i}_{modifier}") for modifier in ("sext", "neg", "abs"))
    read = vector_source(inst, code if field(inst, f"s{i}") else VGPR0 + code)

    def source(w: Wave) -> np.ndarray:
        x = read(w)
        if select < 6:
            width, shift = _sdwa_part(select)
            x = (x >> U32(shift)) & U32((1 << width) - 1)
            if sext:
                x = np.where(x >> U32(width - 1) & U32(1), x | U32(MASK32 << width & MASK32), x).astype(U32)
        x = (x & U32(0xFFFF)).astype(U16).view(dtype) if bits == 16 else x.view(dtype)
        if kind in "fh":
            x = np.abs(x) if absolute else x
            x = -x if neg else x
        return x

    return source


def build_sdwa(inst: Any, name: str) -> Execute:
    """SDWA forms of VOP1, VOP2 and VOPC instructions."""
    if name.startswith("V_CMP"):
        writes_exec, compare, kind = parse_compare(name)
        if writes_exec:
            raise EmuError(name)
        a, b = _sdwa_source(inst, 0, kind), _sdwa_source(inst, 1, kind)
        mask = field(inst, "sdst") if field(inst, "sd") else VCC

        def execute_compare(w: Wave) -> None:
            result = np.broadcast_to(compare(a(w), b(w)), (64,)) & w.active
            w.write_s64(mask, lanes_to_mask(result))

        return execute_compare
    if field(inst, "clmp") or field(inst, "omod"):
        raise EmuError("SDWA clamp/omod")
    is_select = name == "V_CNDMASK_B32"
    kinds, function = ("uu", None) if is_select else OPERATIONS[name][1:]
    sources = [_sdwa_source(inst, i, kind) for i, kind in enumerate(kinds)]
    reg, select, unused = field(inst, "vdst"), field(inst, "dst_sel"), field(inst, "dst_unused")

    def execute(w: Wave) -> None:
        values = [source(w) for source in sources]
        if is_select:
            result = np.where(mask_to_lanes(w.read_s64(VCC)), values[1], values[0])
        else:
            result = np.asarray(function(*values))
        result = result.view(U16).astype(U32) if result.dtype.itemsize == 2 else result.view(U32)
        if select < 6:
            width, shift = _sdwa_part(select)
            mask = U32(((1 << width) - 1) << shift & MASK32)
            result = (result << U32(shift)) & mask
            if unused == 2:
                result = result | (w.vgpr[reg] & ~mask)
            elif unused == 1:
                raise EmuError("SDWA UNUSED_SEXT")
        w.write_vgpr(reg, result)

    return execute


def dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """The source lane of every lane for a DPP16 control word, and whether it exists."""
    row, in_row, always = LANES & ~15, LANES & 15, np.ones(64, bool)
    n = control & 15
    if control < 0x100:  # quad_perm
        return (LANES & ~3) | np.array([(control >> 2 * (i & 3)) & 3 for i in range(64)]), always
    if 0x101 <= control <= 0x10F:  # row_shl
        return row | ((in_row + n) & 15), in_row + n < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return row | ((in_row - n) & 15), in_row - n >= 0
    if 0x121 <= control <= 0x12F:  # row_ror
        return row | ((in_row - n) & 15), always
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row | n, always
    others = {
        0x130: ((LANES + 1) & 63, LANES < 63),  # wave_shl
        0x134: ((LANES + 1) & 63, always),  # wave_rol
        0x138: ((LANES - 1) & 63, LANES > 0),  # wave_shr
        0x13C: ((LANES - 1) & 63, always),  # wave_ror
        0x140: (row | (15 - in_row), always),  # row_mirror
        0x141: ((LANES & ~7) | (7 - (LANES & 7)), always),  # row_half_mirror
        0x142: (np.maximum(row - 1, 0), LANES >= 16),  # row_bcast15
        0x143: (np.where(LANES >= 32, 31, 0), LANES >= 32),  # row_bcast31
    }
    if control not in others:
        raise EmuError(f"dpp control {control:#x}")
    return others[control]


def build_dpp(inst: Any, name: str) -> Execute:
    """DPP16 forms of the table's operations."""
    if name not in OPERATIONS:
        raise EmuError(f"DPP {name}")
    kind, kinds, function = OPERATIONS[name]
    if not set(kind + kinds) <= set("uif"):
        raise EmuError(f"DPP {name}")
    source_lane, exists = dpp_lanes(field(inst, "dpp"))
    rows, banks = field(inst, "row_mask") >> (LANES >> 4), field(inst, "bank_mask") >> ((LANES >> 2) & 3)
    enabled, bound_control = (rows & banks & 1).astype(bool), field(inst, "bc")
    codes, reg = [field(inst, "vsrc0"), field(inst, "vsrc1")], field(inst, "vdst")
    modifiers = [(field(inst, f"src{i}_neg", 0), field(inst, f"src{i}_abs", 0)) for i in range(2)]

    def modified(x: np.ndarray, i: int) -> np.ndarray:
        neg, absolute = modifiers[i]
        if kinds[i] == "f":
            x = np.abs(x.view(F32)) if absolute else x.view(F32)
            return -x if neg else x
        return x.view(I32) if kinds[i] == "i" else x

    def execute(w: Wave) -> None:
        valid = exists & w.active[source_lane]
        values = [modified(np.where(valid, w.vgpr[codes[0]][source_lane], U32(0)).astype(U32), 0)]
        if len(kinds) > 1:
            values.append(modified(w.vgpr[codes[1]], 1))
        written = w.active & enabled & (True if bound_control else valid)
        np.copyto(w.vgpr[reg], np.asarray(function(*values)).view(U32), where=written)

    return execute
