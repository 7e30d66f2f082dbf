"""MXFP8 in exact arithmetic (Python integers and fractions), written from the OCP MX v1.0 definition, for tests.

It shares no code with the package. Numbers enter as Python floats, which hold every float32, bfloat16 and float16.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import torch

BLOCK = 32
NAN_BYTE = 255


def e4m3_value(code: int) -> Fraction:
    """The number of a non-negative finite code (0..126): exponent bias 7, three mantissa bits, no infinity."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 2**6)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3_VALUES = [e4m3_value(code) for code in range(127)]


def round_to_e4m3(magnitude: Fraction) -> int:
    """The code nearest to a non-negative number; a tie goes to the even code; beyond 448 it saturates."""
    above = bisect_left(E4M3_VALUES, magnitude)
    if above == len(E4M3_VALUES):
        return len(E4M3_VALUES) - 1
    if above == 0 or E4M3_VALUES[above] == magnitude:
        return above
    below = above - 1
    to_above, to_below = E4M3_VALUES[above] - magnitude, magnitude - E4M3_VALUES[below]
    if to_above == to_below:
        return above if above % 2 == 0 else below
    return above if to_above < to_below else below


def ceil_log2(x: Fraction) -> int:
    """The smallest integer n with 2**n >= x, for x > 0."""
    n = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** n < x:
        n += 1
    while Fraction(2) ** (n - 1) >= x:
        n -= 1
    return n


def scale_byte(block: Sequence[float]) -> int:
    """127 + ceil(log2(amax / 448)) within [0, 254]; 0 for a block of zeros; 255 if something is not finite."""
    if not all(map(math.isfinite, block)):
        return NAN_BYTE
    amax = max((abs(Fraction(x)) for x in block), default=Fraction(0))
    return 0 if amax == 0 else min(max(127 + ceil_log2(amax / 448), 0), 254)


def quantize_block(block: Sequence[float]) -> tuple[list[int], int]:
    """Element bytes and the scale byte of one block."""
    byte = scale_byte(block)
    if byte == NAN_BYTE:
        return [0x7F] * len(block), byte
    scale = Fraction(2) ** (byte - 127)
    signs = [0x80 if math.copysign(1.0, x) < 0 else 0 for x in block]
    return [sign | round_to_e4m3(abs(Fraction(x)) / scale) for sign, x in zip(signs, block, strict=True)], byte


def quantize_row(row: Sequence[float]) -> tuple[list[int], list[int]]:
    """Element bytes (K) and scale bytes (ceil(K/32))."""
    blocks = [quantize_block(row[start : start + BLOCK]) for start in range(0, len(row), BLOCK)]
    return [code for codes, _ in blocks for code in codes], [byte for _, byte in blocks]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a matrix (N, K): element bytes (N, K) and scale bytes (N, ceil(K/32)), both uint8."""
    rows = [quantize_row(row) for row in x.tolist()]
    n, k = x.shape
    values = torch.tensor([codes for codes, _ in rows], dtype=torch.uint8).reshape(n, k)
    return values, torch.tensor([scales for _, scales in rows], dtype=torch.uint8).reshape(n, (k + BLOCK - 1) // BLOCK)


@cache
def decode(code: int, byte: int) -> float:
    """One element under one scale, exact as a Python float; NaN for a NaN element or a NaN scale."""
    if byte == NAN_BYTE or code & 0x7F == 0x7F:
        return math.nan
    magnitude = float(e4m3_value(code & 0x7F) * Fraction(2) ** (byte - 127))
    return -magnitude if code & 0x80 else magnitude


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Element bytes (N, K) and scale bytes (N, ceil(K/32)), both uint8, to float64 (N, K)."""
    rows = [
        [decode(code, row_scales[index // BLOCK]) for index, code in enumerate(codes)]
        for codes, row_scales in zip(values.tolist(), scales.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(values.shape)
