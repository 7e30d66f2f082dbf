"""The vector instructions that are one function of their sources, by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950.formats import F16, F32, F64, I16, I32, I64, U8, U16, U32, U64, bf16_bits, exponent_field, fma32


def _shift5(amount: np.ndarray) -> np.ndarray:
    return amount & U32(31)


def _shift64(amount: np.ndarray) -> np.ndarray:
    return (amount & U32(63)).astype(U64)


def _low24(a: np.ndarray) -> np.ndarray:
    return a & U32(0xFFFFFF)


def _low24_signed(a: np.ndarray) -> np.ndarray:
    return (a << I32(8)) >> I32(8)


def _concat(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (high.astype(U64) << U64(32)) | low.astype(U64)


def _bit_field_unsigned(a: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    return (a >> _shift5(offset)) & ((U32(1) << _shift5(width)) - U32(1))


def _bit_field_signed(a: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    width = _shift5(width)
    mask = (U32(1) << width) - U32(1)
    value = (a >> _shift5(offset)) & mask
    negative = np.where(width > 0, (value >> (np.maximum(width, 1) - U32(1))) & U32(1), U32(0)) != 0
    return value | np.where(negative, ~mask, U32(0))


def _reverse_bits(a: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").reshape(-1).view(U32)


def _permute_bytes(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """V_PERM_B32: selector 0-7 a byte of {a, b}, 8-11 the sign of a 16-bit part, 12 zero, above 0xff."""
    a, b, selectors = np.broadcast_arrays(a, b, selectors)
    both, result = _concat(a, b), np.zeros(a.shape, U32)
    for i in range(4):
        selector = (selectors >> U32(8 * i)) & U32(0xFF)
        byte = (both >> (U64(8) * (selector & U32(7)).astype(U64))) & U64(0xFF)
        sign = ((both >> (U64(16) * (selector & U32(3)).astype(U64) + U64(15))) & U64(1)) * U64(0xFF)
        chosen = np.select([selector >= 13, selector == 12, selector >= 8], [U64(0xFF), U64(0), sign], byte)
        result |= chosen.astype(U32) << U32(8 * i)
    return result


def scale_by_power(a: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    return np.ldexp(a.astype(F64), np.clip(exponent, -400, 400)).astype(F32)


def _via_float64(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of one fp32 argument, rounded once."""
    return lambda a: function(a.astype(F64)).astype(F32)


def _to_integer(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """fp32 to an integer type: toward zero, saturating, NaN to 0."""
    limits = np.iinfo(dtype)
    return lambda a: np.where(np.isnan(a), 0, np.clip(np.trunc(a.astype(F64)), limits.min, limits.max)).astype(dtype)


def _median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _median_float(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


def _div_fixup(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP_F32: the quotient with the right sign, and the special cases of a division."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)

    def signed(x: np.ndarray) -> np.ndarray:
        return np.where(negative, -x, x).astype(F32)

    infinity, zero, nan = signed(F32(np.inf)), signed(F32(0)), F32(np.nan)
    exponent_d, exponent_n = exponent_field(denominator), exponent_field(numerator)
    cases = [
        (np.isnan(denominator) | np.isnan(numerator), nan),
        (((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator)), nan),
        ((denominator == 0) | np.isinf(numerator), infinity),
        (np.isinf(denominator) | (numerator == 0), zero),
        (exponent_n - exponent_d < -150, zero),
        (exponent_d == 255, infinity),
    ]
    conditions, values = zip(*cases, strict=True)
    return np.select(conditions, values, signed(np.abs(quotient)))


# name: (type of the result, types of the sources, function)
OPERATIONS: dict[str, tuple[str, str, Callable[..., np.ndarray]]] = {
    # 32-bit integers
    "V_MOV_B32": ("u", "u", lambda a: a),
    "V_MOV_B64": ("U", "U", lambda a: a),
    "V_NOT_B32": ("u", "u", operator.invert),
    "V_BFREV_B32": ("u", "u", _reverse_bits),
    "V_ADD_U32": ("u", "uu", operator.add),
    "V_SUB_U32": ("u", "uu", operator.sub),
    "V_SUBREV_U32": ("u", "uu", lambda a, b: b - a),
    "V_MUL_LO_U32": ("u", "uu", operator.mul),
    "V_MUL_HI_U32": ("u", "uu", lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)),
    "V_MUL_HI_I32": ("i", "ii", lambda a, b: ((a.astype(I64) * b.astype(I64)) >> 32).astype(I32)),
    "V_MUL_U32_U24": ("u", "uu", lambda a, b: _low24(a) * _low24(b)),
    "V_MUL_I32_I24": ("i", "ii", lambda a, b: _low24_signed(a) * _low24_signed(b)),
    "V_MAD_U32_U24": ("u", "uuu", lambda a, b, c: _low24(a) * _low24(b) + c),
    "V_MAD_I32_I24": ("i", "iii", lambda a, b, c: _low24_signed(a) * _low24_signed(b) + c),
    "V_ADD3_U32": ("u", "uuu", lambda a, b, c: a + b + c),
    "V_MIN_I32": ("i", "ii", np.minimum),
    "V_MAX_I32": ("i", "ii", np.maximum),
    "V_MIN_U32": ("u", "uu", np.minimum),
    "V_MAX_U32": ("u", "uu", np.maximum),
    "V_MIN3_I32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "V_MAX3_I32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_MED3_I32": ("i", "iii", _median),
    # 32-bit logic and shifts
    "V_AND_B32": ("u", "uu", operator.and_),
    "V_OR_B32": ("u", "uu", operator.or_),
    "V_XOR_B32": ("u", "uu", operator.xor),
    "V_XNOR_B32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "V_AND_OR_B32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "V_OR3_B32": ("u", "uuu", lambda a, b, c: a | b | c),
    "V_XAD_U32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "V_LSHLREV_B32": ("u", "uu", lambda a, b: b << _shift5(a)),
    "V_LSHRREV_B32": ("u", "uu", lambda a, b: b >> _shift5(a)),
    "V_ASHRREV_I32": ("i", "ui", lambda a, b: b >> _shift5(a).astype(I32)),
    "V_LSHL_ADD_U32": ("u", "uuu", lambda a, b, c: (a << _shift5(b)) + c),
    "V_ADD_LSHL_U32": ("u", "uuu", lambda a, b, c: (a + b) << _shift5(c)),
    "V_LSHL_OR_B32": ("u", "uuu", lambda a, b, c: (a << _shift5(b)) | c),
    "V_BFE_U32": ("u", "uuu", _bit_field_unsigned),
    "V_BFE_I32": ("u", "uuu", _bit_field_signed),
    "V_BFI_B32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "V_PERM_B32": ("u", "uuu", _permute_bytes),
    "V_ALIGNBIT_B32": ("u", "uuu", lambda a, b, c: (_concat(a, b) >> _shift5(c).astype(U64)).astype(U32)),
    "V_ALIGNBYTE_B32": ("u", "uuu", lambda a, b, c: (_concat(a, b) >> (U64(8) * (c & U32(3)))).astype(U32)),
    # 16-bit integers
    "V_ADD_U16": ("w", "ww", operator.add),
    "V_SUB_U16": ("w", "ww", operator.sub),
    "V_MUL_LO_U16": ("w", "ww", operator.mul),
    "V_LSHLREV_B16": ("w", "ww", lambda a, b: b << (a & U16(15))),
    "V_LSHRREV_B16": ("w", "ww", lambda a, b: b >> (a & U16(15))),
    "V_MAX_U16": ("w", "ww", np.maximum),
    "V_MIN_U16": ("w", "ww", np.minimum),
    "V_MAX_I16": ("w", "ww", lambda a, b: np.maximum(a.view(I16), b.view(I16))),
    "V_MIN_I16": ("w", "ww", lambda a, b: np.minimum(a.view(I16), b.view(I16))),
    # 64-bit integers
    "V_LSHLREV_B64": ("U", "uU", lambda a, b: b << _shift64(a)),
    "V_LSHRREV_B64": ("U", "uU", lambda a, b: b >> _shift64(a)),
    "V_ASHRREV_I64": ("I", "uI", lambda a, b: b >> _shift64(a).astype(I64)),
    "V_LSHL_ADD_U64": ("U", "UuU", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
    # fp32
    "V_ADD_F32": ("f", "ff", operator.add),
    "V_SUB_F32": ("f", "ff", operator.sub),
    "V_SUBREV_F32": ("f", "ff", lambda a, b: b - a),
    "V_MUL_F32": ("f", "ff", operator.mul),
    "V_FMA_F32": ("f", "fff", fma32),
    "V_DIV_FIXUP_F32": ("f", "fff", _div_fixup),
    "V_LDEXP_F32": ("f", "fi", scale_by_power),
    "V_MIN_F32": ("f", "ff", np.fmin),
    "V_MAX_F32": ("f", "ff", np.fmax),
    "V_MIN3_F32": ("f", "fff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "V_MAX3_F32": ("f", "fff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "V_MED3_F32": ("f", "fff", _median_float),
    "V_MINIMUM3_F32": ("f", "fff", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "V_MAXIMUM3_F32": ("f", "fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_EXP_F32": ("f", "f", _via_float64(np.exp2)),
    "V_LOG_F32": ("f", "f", _via_float64(np.log2)),
    "V_RCP_F32": ("f", "f", _via_float64(lambda a: 1.0 / a)),
    "V_RSQ_F32": ("f", "f", _via_float64(lambda a: 1.0 / np.sqrt(a))),
    "V_SQRT_F32": ("f", "f", _via_float64(np.sqrt)),
    "V_RNDNE_F32": ("f", "f", np.rint),
    "V_FLOOR_F32": ("f", "f", np.floor),
    "V_CEIL_F32": ("f", "f", np.ceil),
    "V_TRUNC_F32": ("f", "f", np.trunc),
    "V_FREXP_EXP_I32_F32": ("i", "f", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)),
    "V_FREXP_MANT_F32": ("f", "f", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a).astype(F32)),
    # conversions
    "V_CVT_F32_I32": ("f", "i", lambda a: a.astype(F32)),
    "V_CVT_F32_U32": ("f", "u", lambda a: a.astype(F32)),
    "V_CVT_I32_F32": ("i", "f", _to_integer(I32)),
    "V_CVT_U32_F32": ("u", "f", _to_integer(U32)),
    "V_CVT_F32_F16": ("f", "h", lambda a: a.astype(F32)),
    "V_CVT_F16_F32": ("h", "f", lambda a: a.astype(F16)),
    "V_CVT_F32_BF16": ("f", "w", lambda a: (a.astype(U32) << U32(16)).view(F32)),
    "V_CVT_PK_BF16_F32": ("u", "ff", lambda a, b: bf16_bits(a) | (bf16_bits(b) << U32(16))),
    "V_CVT_F32_UBYTE0": ("f", "u", lambda a: (a & U32(255)).astype(F32)),
}
