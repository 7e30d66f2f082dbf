"""VOP1, VOP2 and VOP3 instructions: those of the table, and those that need more than a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950.formats import (
    BF8,
    F16,
    F32,
    F64,
    FP8,
    LANES,
    U16,
    U32,
    U64,
    all_lanes,
    bf16_bits,
    encode_fp8,
    exponent_field,
    fma32,
    mask_to_lanes,
    merge_half,
)
from gfx950.operands import (
    field,
    literal,
    register_number,
    result_writer,
    scalar_source,
    typed_source,
    typed_sources,
    vector_source,
)
from gfx950.vector_table import OPERATIONS
from gfx950.wave import VCC, Builder, EmuError, Execute, Wave

_VECTOR_BUILDERS: dict[str, Builder] = {}  # operations that do not fit the table above


def _vector_op(*names: str) -> Callable[[Builder], Builder]:
    """Register the builder of some vector operations."""

    def register(builder: Builder) -> Builder:
        _VECTOR_BUILDERS.update(dict.fromkeys(names, builder))
        return builder

    return register


def build_vector(inst: Any, name: str) -> Execute:
    """VOP1, VOP2 and VOP3 instructions without SDWA or DPP."""
    if name not in OPERATIONS:
        if name not in _VECTOR_BUILDERS:
            raise EmuError(f"vector op {name}")
        return _VECTOR_BUILDERS[name](inst, name)
    kind, source_kinds, function = OPERATIONS[name]
    write = result_writer(inst, kind, field(inst, "vdst"))
    sources = typed_sources(inst, source_kinds)
    if len(sources) == 1:
        (a,) = sources
        return lambda w: write(w, function(a(w)))
    if len(sources) == 2:
        a, b = sources
        return lambda w: write(w, function(a(w), b(w)))
    a, b, c = sources
    return lambda w: write(w, function(a(w), b(w), c(w)))


@_vector_op("V_NOP")
def _build_nop(inst: Any, name: str) -> Execute:
    return lambda w: None


@_vector_op("V_FMAC_F32", "V_FMAAK_F32", "V_FMAMK_F32")
def _build_fmac(inst: Any, name: str) -> Execute:
    a, b = typed_sources(inst, "ff")
    reg = field(inst, "vdst")
    write = result_writer(inst, "f", reg)
    if name == "V_FMAC_F32":
        return lambda w: write(w, fma32(a(w), b(w), w.vgpr[reg].view(F32)))
    constant = np.array([literal(inst)], U32).view(F32)
    if name == "V_FMAAK_F32":
        return lambda w: write(w, fma32(a(w), b(w), constant))
    return lambda w: write(w, fma32(a(w), constant, b(w)))


@_vector_op("V_CNDMASK_B32")
def _build_cndmask(inst: Any, name: str) -> Execute:
    has_modifiers = field(inst, "neg", 0) | field(inst, "abs", 0)
    if_clear, if_set = typed_sources(inst, "ff" if has_modifiers else "uu")
    reg, mask = field(inst, "vdst"), field(inst, "src2", VCC)

    def execute(w: Wave) -> None:
        w.write_vgpr(reg, np.where(mask_to_lanes(w.read_s64(mask)), if_set(w).view(U32), if_clear(w).view(U32)))

    return execute


@_vector_op("V_BITOP3_B32", "V_BITOP3_B16")
def _build_bitop3(inst: Any, name: str) -> Execute:
    """Any bitwise function of three sources; the fields omod, abs and neg hold its truth table."""
    is_16bit, opsel, reg = name.endswith("B16"), field(inst, "opsel"), field(inst, "vdst")
    a, b, c = (
        typed_source(inst, field(inst, f"src{i}"), "w" if is_16bit else "u", high=opsel >> i & 1) for i in range(3)
    )
    table = field(inst, "omod") << 6 | field(inst, "abs") << 3 | field(inst, "neg")
    minterms = [i for i in range(8) if table >> i & 1]

    def execute(w: Wave) -> None:
        x, y, z = a(w), b(w), c(w)
        result = np.zeros(64, x.dtype)
        for i in minterms:
            result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        if is_16bit:  # the other half is kept; LLVM relies neither on that nor on zeros
            result = merge_half(w.vgpr[reg], result.astype(U32), opsel >> 3 & 1)
        w.write_vgpr(reg, result)

    return execute


@_vector_op("V_DIV_FMAS_F32")
def _build_div_fmas(inst: Any, name: str) -> Execute:
    a, b, c = typed_sources(inst, "fff")
    reg = field(inst, "vdst")

    def execute(w: Wave) -> None:
        addend = c(w)
        result = fma32(a(w), b(w), addend)
        scale = np.where(exponent_field(all_lanes(addend)) > 127, F32(2.0**64), F32(2.0**-64))
        w.write_vgpr(reg, np.where(mask_to_lanes(w.read_s64(VCC)), result * scale, result).astype(F32).view(U32))

    return execute


@_vector_op("V_CVT_PK_FP8_F32", "V_CVT_PK_BF8_F32", "V_CVT_SCALEF32_PK_FP8_F32", "V_CVT_SCALEF32_PK_BF8_F32")
def _build_convert_to_fp8(inst: Any, name: str) -> Execute:
    """Two fp32, divided by the power of two of a scale, to two FP8 or BF8 in one half of the result."""
    is_scaled, kind, reg = "SCALEF32" in name, name.split("_")[-2], field(inst, "vdst")
    sources, high = typed_sources(inst, "fff" if is_scaled else "ff"), field(inst, "opsel") >> 3 & 1

    def execute(w: Wave) -> None:
        a, b = (all_lanes(source(w)).astype(F64) for source in sources[:2])
        if is_scaled:
            factor = np.exp2(127.0 - exponent_field(all_lanes(sources[2](w))))
            a, b = a * factor, b * factor
        saturate = w.mode >> 23 & 1  # MODE.FP16_OVFL
        pair = encode_fp8(a, saturate, kind) | (encode_fp8(b, saturate, kind) << U32(8))
        w.write_vgpr(reg, merge_half(w.vgpr[reg], pair, high))

    return execute


@_vector_op(*(f"V_CVT_SCALEF32_PK_{to}_{kind}" for to in ("F32", "F16", "BF16") for kind in ("FP8", "BF8")))
def _build_convert_from_fp8(inst: Any, name: str) -> Execute:
    """Two FP8 or BF8 of one half of the source, times the power of two of a scale, to two wider floats."""
    to, kind = name.split("_")[4:]
    table, reg = FP8 if kind == "FP8" else BF8, field(inst, "vdst")
    source, scale = vector_source(inst, field(inst, "src0")), typed_source(inst, field(inst, "src1"), "f")
    shift = U32(16 * (field(inst, "opsel") & 1))

    def execute(w: Wave) -> None:
        codes = all_lanes(source(w)) >> shift
        factor = np.exp2(exponent_field(all_lanes(scale(w))) - 127.0)
        first, second = ((table[(codes >> U32(s)) & U32(255)] * factor).astype(F32) for s in (0, 8))
        if to == "F32":
            w.write_vgpr(reg, first.view(U32))
            w.write_vgpr(reg + 1, second.view(U32))
        elif to == "BF16":
            w.write_vgpr(reg, bf16_bits(first) | (bf16_bits(second) << U32(16)))
        else:
            low, high = (x.astype(F16).view(U16).astype(U32) for x in (first, second))
            w.write_vgpr(reg, low | (high << U32(16)))

    return execute


@_vector_op("V_CVT_F32_FP8", "V_CVT_F32_BF8")
def _build_convert_one_from_fp8(inst: Any, name: str) -> Execute:
    table = (FP8 if name.endswith("_FP8") else BF8).astype(F32)
    source, reg = vector_source(inst, field(inst, "src0")), field(inst, "vdst")
    return lambda w: w.write_vgpr(reg, table[source(w) & U32(255)].view(U32))


@_vector_op("V_READFIRSTLANE_B32")
def _build_readfirstlane(inst: Any, name: str) -> Execute:
    source, reg = vector_source(inst, field(inst, "src0")), field(inst, "vdst")

    def execute(w: Wave) -> None:
        lane = int(np.argmax(w.active))  # lane 0 if none is active
        w.sgpr[reg] = int(all_lanes(source(w))[lane])

    return execute


@_vector_op("V_READLANE_B32")
def _build_readlane(inst: Any, name: str) -> Execute:
    source, lane = vector_source(inst, field(inst, "src0")), scalar_source(inst, field(inst, "src1"))
    reg = field(inst, "vdst")

    def execute(w: Wave) -> None:
        w.sgpr[reg] = int(all_lanes(source(w))[lane(w) & 63])

    return execute


@_vector_op("V_WRITELANE_B32")
def _build_writelane(inst: Any, name: str) -> Execute:
    source, lane = scalar_source(inst, field(inst, "src0")), scalar_source(inst, field(inst, "src1"))
    reg = field(inst, "vdst")

    def execute(w: Wave) -> None:
        w.vgpr[reg][lane(w) & 63] = source(w)

    return execute


@_vector_op("V_PERMLANE32_SWAP_B32", "V_PERMLANE16_SWAP_B32")
def _build_permlane_swap(inst: Any, name: str) -> Execute:
    """Exchange the odd rows (of 32 or 16 lanes) of the destination with the even rows of the source."""
    rows = 32 if "32_SWAP" in name else 16
    source, reg = register_number(inst, "src0"), field(inst, "vdst")

    def execute(w: Wave) -> None:
        for even in range(0, 64, 2 * rows):
            odd = even + rows
            saved = w.vgpr[source, even:odd].copy()
            w.vgpr[source, even:odd] = w.vgpr[reg, odd : odd + rows]
            w.vgpr[reg, odd : odd + rows] = saved

    return execute


@_vector_op("V_SWAP_B32")
def _build_swap(inst: Any, name: str) -> Execute:
    source, reg = register_number(inst, "src0"), field(inst, "vdst")

    def execute(w: Wave) -> None:
        saved = w.vgpr[source].copy()
        w.write_vgpr(source, w.vgpr[reg].copy())
        w.write_vgpr(reg, saved)

    return execute


@_vector_op("V_MBCNT_LO_U32_B32", "V_MBCNT_HI_U32_B32")
def _build_count_bits_below(inst: Any, name: str) -> Execute:
    """Add to the second source the number of bits of a half mask that belong to lower lanes."""
    mask, addend = typed_sources(inst, "uu")
    reg = field(inst, "vdst")
    below = np.minimum(LANES, 32) if "_LO_" in name else np.maximum(LANES - 32, 0)
    lower_lanes = (U64(1) << below.astype(U64)) - U64(1)

    def execute(w: Wave) -> None:
        counts = [int(bits).bit_count() for bits in mask(w).astype(U64) & lower_lanes]
        w.write_vgpr(reg, np.array(counts, U32) + addend(w))

    return execute


@_vector_op("V_ACCVGPR_MOV_B32")
def _build_accvgpr_mov(inst: Any, name: str) -> Execute:
    source, reg = register_number(inst, "src0"), field(inst, "vdst")
    return lambda w: w.write_vgpr(reg, w.agpr[source], accumulator=True)
