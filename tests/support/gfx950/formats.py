"""Number formats, rounding and bit masks, as numpy arrays over lanes."""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
LANES = np.arange(64)


def _float_table(exponent_bits: int, mantissa_bits: int, bias: int, special: str = "") -> np.ndarray:
    """The value of every code of a small float.  special: "fn" (all ones is NaN), "ieee" (Inf and NaN), "" (none)."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    top = (1 << exponent_bits) - 1
    exponent = (code >> mantissa_bits) & top
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if special == "fn":
        value[(code & 0x7F) == 0x7F] = np.nan
    elif special == "ieee":
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    return np.where(code >> (exponent_bits + mantissa_bits) == 1, -value, value)


FP8, BF8 = _float_table(4, 3, 7, "fn"), _float_table(5, 2, 15, "ieee")  # e4m3fn, e5m2
FP6, BF6, FP4 = _float_table(2, 3, 1), _float_table(3, 2, 3), _float_table(2, 1, 1)
E8M0 = np.append(np.exp2(np.arange(255.0) - 127), np.nan)  # the scale of a block of 32

# mantissa bits, smallest exponent of a normal number, largest value, code of an overflow that does not saturate
_FP8_LIMITS = {"FP8": (3, -6, 448.0, 0x7F), "BF8": (2, -14, 57344.0, 0x7C)}


def encode_fp8(x: np.ndarray, saturate: int, kind: str = "FP8") -> np.ndarray:
    """float64 to FP8 or BF8 codes, to nearest even; an overflow gives the largest value, or NaN (FP8) or Inf (BF8)."""
    mantissa_bits, min_exponent, largest, overflow_code = _FP8_LIMITS[kind]

    def ulp_exponent(value: np.ndarray) -> np.ndarray:
        return np.where(value == 0, min_exponent, np.maximum(np.frexp(value)[1] - 1, min_exponent)) - mantissa_bits

    magnitude = np.abs(x)
    ulp = np.ldexp(1.0, ulp_exponent(np.where(np.isfinite(x), magnitude, 0.0)))
    rounded = np.rint(magnitude / ulp) * ulp
    overflow = rounded > largest
    rounded = np.where(overflow, largest, np.where(np.isnan(x), 0.0, rounded))
    exponent = ulp_exponent(rounded)
    code = np.ldexp(rounded, -exponent).astype(I64) + ((exponent + mantissa_bits - min_exponent) << mantissa_bits)
    if not saturate:
        code = np.where(overflow, overflow_code, code)
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | (np.signbit(x).astype(I64) << 7)).astype(U32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 codes (uint32), to nearest even."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded).astype(U32)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Exact fp32 fused multiply-add: the float64 sum is rounded to odd, so that only the rounding to fp32 counts."""
    a, b, c = np.broadcast_arrays(a.astype(F64), b.astype(F64), c.astype(F64))
    product = a * b  # exact: 24 + 24 bits
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.ascontiguousarray(total).view(I64)
    inexact_even = np.isfinite(total) & np.isfinite(error) & (error != 0) & ((bits & 1) == 0)
    away_from_zero = (error > 0) == (total > 0)
    return np.where(inexact_even, (bits + np.where(away_from_zero, 1, -1)).view(F64), total).astype(F32)


def exponent_field(x: np.ndarray) -> np.ndarray:
    """The biased exponent of float32 values."""
    return ((x.view(U32) >> U32(23)) & U32(255)).astype(I32)


def mask_to_lanes(mask: int) -> np.ndarray:
    """64-bit mask to 64 booleans."""
    return np.unpackbits(np.array([mask & MASK64], "<u8").view(U8), bitorder="little").view(bool)


def lanes_to_mask(lanes: np.ndarray) -> int:
    """64 booleans to a 64-bit mask."""
    return int(np.packbits(lanes, bitorder="little").view("<u8")[0])


def sign_extend(value: int, bits: int) -> int:
    """The low bits of value as a signed number."""
    return (value & ((1 << bits) - 1)) - ((value >> (bits - 1) & 1) << bits)


def signed32(value: int) -> int:
    """The low 32 bits of value as a signed number."""
    return sign_extend(value, 32)


def merge_half(old: np.ndarray, half: np.ndarray, high: int) -> np.ndarray:
    """Replace the low or the high 16 bits of uint32 values; half has no bits above 16."""
    return (old & U32(0xFFFF)) | (half << U32(16)) if high else (old & U32(0xFFFF0000)) | half


def all_lanes(values: np.ndarray) -> np.ndarray:
    """A (1,) or (64,) array as a contiguous (64,) array."""
    return np.ascontiguousarray(np.broadcast_to(values, (64,)))
