"""Instruction fields, and the operands that they name, as functions of a wave."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950.formats import F16, F32, F64, I32, I64, MASK32, MASK64, U16, U32, U64, merge_half
from gfx950.wave import EXEC, VCC, VGPR0, EmuError, ScalarSource, VectorSource, Wave

_INLINE_FLOATS = dict(enumerate((0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532), start=240))
# operand types: (bits, dtype); w and h are 16-bit halves of a register
TYPES: dict[str, tuple[int, Any]] = {
    "u": (32, U32),
    "i": (32, I32),
    "f": (32, F32),
    "U": (64, U64),
    "I": (64, I64),
    "F": (64, F64),
    "w": (16, U16),
    "h": (16, F16),
}


def field(inst: Any, name: str, default: Any = None) -> Any:
    """The raw bits of a field of an instruction; default if its encoding has no such field."""
    bits = getattr(type(inst), name, None)
    return default if bits is None else (inst._raw >> bits.lo) & bits.mask


def register_number(inst: Any, name: str) -> int:
    """The number of the vector or accumulator register that a source field names."""
    code = field(inst, name)
    if code < VGPR0:
        raise EmuError(f"{name} is not a vector register")
    return code - VGPR0


def literal(inst: Any) -> int:
    """The 32-bit literal constant of an instruction."""
    if hasattr(type(inst), "literal"):
        return field(inst, "literal")
    return (inst._raw >> (8 * type(inst)._base_size)) & MASK32


def scalar_source(inst: Any, code: int, bits: int = 32) -> ScalarSource:
    """How to read a scalar operand as an unsigned int."""
    if code < 128:
        if bits == 32:
            return lambda w: w.sgpr[code]
        return lambda w: w.sgpr[code] | (w.sgpr[code + 1] << 32)
    if code == 251:
        return lambda w: int(w.read_s64(VCC) == 0)
    if code == 252:
        return lambda w: int(w.read_s64(EXEC) == 0)
    if code == 253:
        return lambda w: w.scc
    if code <= 192:
        constant = code - 128
    elif code <= 208:
        constant = (192 - code) & (MASK32 if bits == 32 else MASK64)
    elif code in _INLINE_FLOATS:
        as_float, as_int = ("<f", "<I") if bits == 32 else ("<d", "<Q")
        (constant,) = struct.unpack(as_int, struct.pack(as_float, _INLINE_FLOATS[code]))
    elif code == 255:
        constant = literal(inst)
    else:
        raise EmuError(f"scalar operand {code}")
    return lambda w: constant


def vector_source(inst: Any, code: int, bits: int = 32) -> VectorSource:
    """How to read any operand as uint32 (bits <= 32) or uint64: an array of 64 lanes, or of 1 if it is uniform."""
    if code >= VGPR0:
        reg = code - VGPR0
        if bits <= 32:
            return lambda w: w.vgpr[reg]
        return lambda w: w.vgpr[reg].astype(U64) | (w.vgpr[reg + 1].astype(U64) << U64(32))
    scalar, dtype = scalar_source(inst, code, max(bits, 32)), U32 if bits <= 32 else U64
    return lambda w: np.array([scalar(w)], dtype)


def typed_source(inst: Any, code: int, kind: str, neg: int = 0, absolute: int = 0, high: int = 0) -> VectorSource:
    """How to read an operand as one of TYPES, with the source modifiers (neg and abs act on floats only)."""
    bits, dtype = TYPES[kind]
    read = vector_source(inst, code, bits)
    if kind in "wh":
        if kind == "h" and code in _INLINE_FLOATS:
            constant = np.array([_INLINE_FLOATS[code]], F16)
            return _with_float_modifiers(lambda w: constant, neg, absolute)
        shift = U32(16 if high else 0)

        def read_half(w: Wave) -> np.ndarray:
            return ((read(w) >> shift) & U32(0xFFFF)).astype(U16).view(dtype)

        return _with_float_modifiers(read_half, neg, absolute) if kind == "h" else read_half
    if kind in "uU":
        return read
    if kind in "fF":
        return _with_float_modifiers(lambda w: read(w).view(dtype), neg, absolute)
    return lambda w: read(w).view(dtype)


def _with_float_modifiers(read: VectorSource, neg: int, absolute: int) -> VectorSource:
    if absolute:
        return (lambda w: -np.abs(read(w))) if neg else (lambda w: np.abs(read(w)))
    return (lambda w: -read(w)) if neg else read


def typed_sources(inst: Any, kinds: str) -> list[VectorSource]:
    """The sources of a VOP1, VOP2, VOPC or VOP3 instruction, read as the given types."""
    encoding = type(inst)
    codes = [field(inst, "src0")]
    if hasattr(encoding, "src1"):
        codes += [field(inst, "src1"), field(inst, "src2")]
        neg, absolute, opsel = field(inst, "neg", 0), field(inst, "abs", 0), field(inst, "opsel", 0)
    else:
        codes += [VGPR0 + field(inst, "vsrc1")] if hasattr(encoding, "vsrc1") else []
        neg = absolute = opsel = 0
    return [
        typed_source(inst, codes[i], kind, neg >> i & 1, absolute >> i & 1, opsel >> i & 1)
        for i, kind in enumerate(kinds)
    ]


def result_writer(inst: Any, kind: str, reg: int) -> Callable[[Wave, np.ndarray], None]:
    """How to write a result of a given type, with the output modifiers (omod, clamp, op_sel)."""
    clamp, omod, high = field(inst, "clmp", 0), field(inst, "omod", 0), field(inst, "opsel", 0) >> 3 & 1

    def write_float(w: Wave, result: np.ndarray) -> None:
        result = np.asarray(result, F32)
        if omod:
            result = result * F32((1, 2, 4, 0.5)[omod])
        if clamp:
            result = np.clip(np.where(np.isnan(result), F32(0), result), F32(0), F32(1))
        w.write_vgpr(reg, result.view(U32))

    def write_integer(w: Wave, result: np.ndarray) -> None:
        if clamp:
            raise EmuError("integer clamp not implemented")
        w.write_vgpr(reg, result.view(U32))

    def write_64(w: Wave, result: np.ndarray) -> None:
        w.write_vgpr64(reg, np.asarray(result).view(U64))

    def write_16(w: Wave, result: np.ndarray) -> None:
        value = np.asarray(result).view(U16).astype(U32)
        w.write_vgpr(reg, merge_half(w.vgpr[reg], value, 1) if high else value)  # GFX9 clears the upper half

    return write_float if kind == "f" else write_integer if kind in "ui" else write_64 if kind in "UIF" else write_16
