"""MXFP8: what a block-scaled FP8 tensor is, and how to make and read one with torch operators alone.

The format is OCP Microscaling (MX) v1.0 with E4M3 elements: along the last dimension, 32 consecutive elements share one
power-of-two scale. ``value = element * 2**(byte - 127)``; byte 0 means 2**-127, byte 255 means NaN. The last block is
short when K is not a multiple of 32.

The scale is rounded up, ``byte = 127 + ceil(log2(amax / 448))``, so that the largest element of a block never
saturates (448 is E4M3's largest value). It is computed on the bits of float32, because a floating-point log2 is off by
one step near ``448 * 2**k``. ``kernels/triton`` computes the same bytes on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError

BLOCK_SIZE = 32
E4M3_MAX = 448.0
NAN_SCALE = 255  # the whole block is NaN
NAN_ELEMENT = 0x7F

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_DECODED_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_DEQUANTIZED_DTYPES = (*_DECODED_DTYPES, torch.float16)


def scale_count(k: int) -> int:
    """How many scale bytes K elements have: ``ceil(k / 32)``."""
    return (k + BLOCK_SIZE - 1) // BLOCK_SIZE


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension.

    Args:
        x: (..., K), float32, bfloat16 or float16. A float64 tensor is rounded to float32 first.

    Returns:
        values (..., K) float8_e4m3fn, rounded to nearest even, and scales (..., ceil(K/32)) uint8, both contiguous.
        A block of zeros has byte 0. A block that holds a NaN or an infinity has byte 255 and elements 0x7F (NaN), so
        that it decodes to NaN even in a kernel that reads byte 255 as 2**128. Zeros keep their sign.

    Raises:
        ExpertInputError: x is not one of these dtypes, or has no dimension.
    """
    if x.dtype not in _SOURCE_DTYPES:
        raise ExpertInputError(f"quantize: x is {_name(x.dtype)}, expected one of {_names(_SOURCE_DTYPES)}")
    if x.dim() == 0:
        raise ExpertInputError("quantize: x has no dimension, expected shape (..., K)")
    k = x.shape[-1]
    blocks = _to_blocks(x.float())  # (..., ceil(K/32), 32)
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF  # ordered as the absolute values are; NaN and Inf come last
    amax = magnitude.amax(-1, keepdim=True)  # (..., ceil(K/32), 1)
    poisoned = amax >= 0x7F800000

    # amax = m * 2**e with 1 <= m < 2, and 448 = 1.75 * 2**8: ceil(log2(amax / 448)) is e - 8, plus one if m > 1.75.
    # Adding 0x1FFFFF carries into the exponent exactly when the 23 bits of m exceed 0x600000 (m > 1.75).
    byte = (((amax + 0x1FFFFF) >> 23) - 8).clamp(0, 254)

    # No element exceeds 448 after scaling. Both factors are normal numbers and both products are exact, or so small
    # that they round to zero. A float32 subnormal is m * 2**-149: as an integer m it survives where the processor
    # treats subnormal operands as zero (torch.set_flush_denormal(True) loses every block below 2**-126 otherwise).
    scaled = blocks * _power_of_two(127 - byte)
    subnormal = magnitude.float() * _power_of_two((127 - 149) - byte)
    scaled = torch.where(magnitude < 0x00800000, subnormal.copysign(blocks), scaled)
    values = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    values = torch.where(poisoned, NAN_ELEMENT, values).to(torch.uint8)
    scales = torch.where(poisoned, NAN_SCALE, byte).to(torch.uint8)
    return _from_blocks(values, k).view(torch.float8_e4m3fn), scales.squeeze(-1).contiguous()


def quantize_experts(weight: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """`quantize` one expert at a time, so that the float32 temporaries are those of one expert.

    Args:
        weight: (E, N, K), any strides, a dtype that `quantize` takes.
        out: values (E, N, K) and scales (E, N, ceil(K/32)) to write in place, any strides; made if absent.

    Raises:
        ExpertInputError: weight is not 3-D, or ``out`` does not fit it.
    """
    if weight.dim() != 3:
        raise ExpertInputError(f"quantize_experts: weight has shape {tuple(weight.shape)}, expected (E, N, K)")
    num_experts, n, k = weight.shape
    if out is None:
        out = (
            torch.empty((num_experts, n, k), dtype=torch.float8_e4m3fn, device=weight.device),
            torch.empty((num_experts, n, scale_count(k)), dtype=torch.uint8, device=weight.device),
        )
    values, scales = out
    if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        got = f"{_name(values.dtype)} and {_name(scales.dtype)}"
        raise ExpertInputError(f"quantize_experts: out is {got}, expected float8_e4m3fn and uint8")
    if values.shape != weight.shape or scales.shape != (num_experts, n, scale_count(k)):
        got = f"{tuple(values.shape)} and {tuple(scales.shape)}"
        expected = f"{tuple(weight.shape)} and {(num_experts, n, scale_count(k))}"
        raise ExpertInputError(f"quantize_experts: out has shapes {got}, expected {expected}")
    for expert in range(num_experts):
        expert_values, expert_scales = quantize(weight[expert])
        values[expert].copy_(expert_values)
        scales[expert].copy_(expert_scales)
    return values, scales


def decode_scales(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The scales as numbers, ``2**(byte - 127)``: byte 0 is 2**-127, 254 is 2**127, 255 is NaN, all exact.

    Args:
        scales: uint8 or float8_e8m0fnu, any shape.
        dtype: float32, bfloat16 or float64. (float16 does not hold these numbers.)

    Raises:
        ExpertInputError: another dtype, of either.
    """
    if scales.dtype not in _SCALE_DTYPES:
        raise ExpertInputError(f"scales are {_name(scales.dtype)}, expected E8M0 bytes as {_names(_SCALE_DTYPES)}")
    if dtype not in _DECODED_DTYPES:
        raise ExpertInputError(f"decode_scales: dtype is {_name(dtype)}, expected one of {_names(_DECODED_DTYPES)}")
    byte = scales.view(torch.uint8).to(torch.int32)
    bits = byte << 23
    # Byte 0 would read as 0.0 and byte 255 as infinity; this mantissa bit makes them 2**-127 (subnormal) and NaN.
    bits = torch.where((byte == 0) | (byte == 255), bits | 0x00400000, bits)
    return bits.view(torch.float32).to(dtype)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``values * 2**(byte - 127)`` block by block, exact in every dtype whose range holds the result.

    Args:
        values: (..., K) float8_e4m3fn.
        scales: (..., ceil(K/32)) uint8 or float8_e8m0fnu.
        dtype: float32, bfloat16, float64 or float16.

    Returns:
        (..., K), contiguous.

    Raises:
        ExpertInputError: another dtype, or shapes that do not fit together.
    """
    if values.dtype != torch.float8_e4m3fn:
        raise ExpertInputError(f"dequantize: values are {_name(values.dtype)}, expected float8_e4m3fn")
    if dtype not in _DEQUANTIZED_DTYPES:
        raise ExpertInputError(f"dequantize: dtype is {_name(dtype)}, expected one of {_names(_DEQUANTIZED_DTYPES)}")
    if values.dim() == 0:
        raise ExpertInputError("dequantize: values have no dimension, expected shape (..., K)")
    k = values.shape[-1]
    expected = (*values.shape[:-1], scale_count(k))
    if scales.shape != expected:
        raise ExpertInputError(
            f"dequantize: scales have shape {tuple(scales.shape)}, expected {tuple(expected)} "
            f"(one byte per {BLOCK_SIZE} of values {tuple(values.shape)})"
        )
    # An element has 4 significant bits, so the product is exact in bfloat16 as well, at half the memory of float32.
    product_dtype = torch.float32 if dtype == torch.float16 else dtype
    factor = decode_scales(scales, product_dtype).unsqueeze(-1)
    return _from_blocks(_to_blocks(values.to(product_dtype)) * factor, k).to(dtype)


def _to_blocks(x: Tensor) -> Tensor:
    """(..., K) -> (..., ceil(K/32), 32), zeros behind K."""
    k = x.shape[-1]
    count = scale_count(k)
    if k % BLOCK_SIZE:
        x = torch.nn.functional.pad(x, (0, count * BLOCK_SIZE - k))
    return x.reshape(*x.shape[:-1], count, BLOCK_SIZE)


def _from_blocks(blocks: Tensor, k: int) -> Tensor:
    """(..., ceil(K/32), 32) -> (..., K), contiguous."""
    return blocks.flatten(-2)[..., :k].contiguous()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32 from int32, exact in the normal range -126..127; 0.0 below it."""
    return ((exponent + 127).clamp(min=0) << 23).view(torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(_name(dtype) for dtype in dtypes)
