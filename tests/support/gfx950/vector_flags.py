"""Vector instructions that write a mask: compares, carries, division steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gfx950.formats import (
    F32,
    F64,
    I32,
    I64,
    MASK32,
    U32,
    U64,
    all_lanes,
    exponent_field,
    lanes_to_mask,
    mask_to_lanes,
)
from gfx950.operands import field, typed_source, typed_sources, vector_source
from gfx950.vector_table import scale_by_power
from gfx950.wave import EXEC, VCC, EmuError, Execute, VectorSource, Wave

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "EQ": operator.eq,
    "LE": operator.le,
    "GT": operator.gt,
    "NE": operator.ne,
    "LG": operator.ne,
    "GE": operator.ge,
    "NLT": lambda a, b: ~(a < b),
    "NEQ": lambda a, b: ~(a == b),
    "NLE": lambda a, b: ~(a <= b),
    "NGT": lambda a, b: ~(a > b),
    "NGE": lambda a, b: ~(a >= b),
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
}
COMPARE_KINDS = {"I32": "i", "U32": "u", "F32": "f", "I64": "I", "U64": "U", "F64": "F", "U16": "w", "F16": "h"}


def parse_compare(name: str) -> tuple[bool, Callable[[Any, Any], Any], str]:
    """V_CMP[X]_<condition>_<type>: whether EXEC is written, the comparison, the type of the operands."""
    _, opcode, condition, kind = name.split("_")
    if condition not in COMPARE or kind not in COMPARE_KINDS:
        raise EmuError(name)
    return opcode == "CMPX", COMPARE[condition], COMPARE_KINDS[kind]


def build_compare(inst: Any, name: str) -> Execute:
    """V_CMP and V_CMPX in the VOPC and VOP3 encodings."""
    writes_exec, compare, kind = parse_compare(name)
    a, b = typed_sources(inst, kind * 2)
    reg = field(inst, "vdst", VCC)

    def execute(w: Wave) -> None:
        mask = lanes_to_mask(np.broadcast_to(compare(a(w), b(w)), (64,)) & w.active)
        w.write_s64(reg, mask)
        if writes_exec:
            w.write_s64(EXEC, mask)

    return execute


def build_vop3_sdst(inst: Any, name: str) -> Execute:
    """VOP3 instructions with a carry or flag output."""
    codes, reg, flags = [field(inst, f"src{i}") for i in range(3)], field(inst, "vdst"), field(inst, "sdst")
    if name == "V_DIV_SCALE_F32":
        neg = field(inst, "neg", 0)
        return _build_div_scale([typed_source(inst, codes[i], "f", neg >> i & 1) for i in range(3)], reg, flags)
    if name in ("V_MAD_U64_U32", "V_MAD_I64_I32"):
        kinds, wide = ("iiU", I64) if name == "V_MAD_I64_I32" else ("uuU", U64)
        sources = [typed_source(inst, code, kind) for code, kind in zip(codes, kinds, strict=True)]
        return _build_wide_mad(sources, wide, reg, flags)
    if "_CO_U32" in name:
        return build_carry(name, [vector_source(inst, code) for code in codes[:2]], reg, flags, codes[2])
    raise EmuError(name)


def build_carry(name: str, sources: Sequence[VectorSource], reg: int, carry_out: int, carry_in: int) -> Execute:
    """The V_{ADD,SUB,SUBREV,ADDC,SUBB,SUBBREV}_CO_U32 family."""
    first, second = reversed(sources) if "REV" in name else sources
    subtracts, takes_carry = "SUB" in name, "ADDC" in name or "SUBB" in name

    def execute(w: Wave) -> None:
        a, b = first(w).astype(I64), second(w).astype(I64)
        carry = mask_to_lanes(w.read_s64(carry_in)).astype(I64) if takes_carry else 0
        result = np.broadcast_to(a - b - carry if subtracts else a + b + carry, (64,))
        w.write_s64(carry_out, lanes_to_mask(((result >> 32) != 0) & w.active))
        w.write_vgpr(reg, (result & MASK32).astype(U32))

    return execute


def _build_wide_mad(sources: Sequence[VectorSource], wide: Any, reg: int, carry_out: int) -> Execute:
    def execute(w: Wave) -> None:
        a, b, c = (source(w) for source in sources)
        result = np.broadcast_to((a.astype(wide) * b.astype(wide)).view(U64) + c, (64,))
        w.write_s64(carry_out, lanes_to_mask((result < c) & w.active))
        w.write_vgpr64(reg, result)

    return execute


def _build_div_scale(sources: Sequence[VectorSource], reg: int, flags: int) -> Execute:
    """V_DIV_SCALE_F32 (value, denominator, numerator): scale the value so that the division steps stay normal."""

    def is_denormal(x: np.ndarray) -> np.ndarray:
        return (x != 0) & (np.abs(x) < 2.0**-126)

    def execute(w: Wave) -> None:
        value, denominator, numerator = (all_lanes(source(w)) for source in sources)
        exponent_d, exponent_n = exponent_field(denominator), exponent_field(numerator)
        scaled_up, scaled_down = (scale_by_power(value, np.full(64, e, I32)) for e in (64, -64))
        quotient_denormal = is_denormal(numerator.astype(F64) / denominator.astype(F64))
        reciprocal_vanishes = np.abs(1.0 / denominator.astype(F64)) < 2.0**-1022
        if_denominator = np.where(value == denominator, scaled_up, value)
        if_numerator = np.where(value == numerator, scaled_up, value)
        cases = [  # the first that holds: condition, result, flag for V_DIV_FMAS
            ((numerator == 0) | (denominator == 0), F32(np.nan), False),
            (exponent_n - exponent_d >= 96, if_denominator, True),
            (is_denormal(denominator), scaled_up, False),
            (reciprocal_vanishes & quotient_denormal, if_denominator, True),
            (reciprocal_vanishes, scaled_down, False),
            (quotient_denormal, if_numerator, True),
            (exponent_n <= 23, scaled_up, False),
        ]
        conditions, results, flagged = zip(*cases, strict=True)
        w.write_s64(flags, lanes_to_mask(np.select(conditions, flagged, False) & w.active))
        w.write_vgpr(reg, np.select(conditions, results, value).view(U32))

    return execute
