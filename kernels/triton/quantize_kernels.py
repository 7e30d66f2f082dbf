# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Quantise activations to MXFP8, byte for byte as `moe_compile.kernels.mxfp8.quantize` does."""

import triton
import triton.language as tl

from moe_compile.kernels.triton.decode import to_f32


@triton.jit
def quantize_blocks(x):
    """(blocks, 32) float32 -> (blocks, 32) E4M3 and (blocks,) E8M0 bytes, both uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    poisoned = amax >= 0x7F800000  # a NaN or an infinity

    # 127 + ceil(log2(amax / 448)): the addition carries into the exponent when the mantissa exceeds 1.75.
    byte = ((amax + 0x1FFFFF) >> 23) - 8
    byte = tl.where(byte < 0, 0, byte)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]  # at most 448

    # Round to nearest even: in the mantissa above 2**-6, below it as a count of 2**-9 (adding 2**23 rounds it).
    scaled_bits = scaled.to(tl.int32, bitcast=True)
    normal = ((scaled_bits + 0x7FFFF + ((scaled_bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (scaled * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    value = tl.where(scaled < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    value = tl.where(poisoned[:, None], 0x7F, value)
    return value.to(tl.uint8), tl.where(poisoned, 255, byte).to(tl.uint8)


@triton.jit
def quantize_kernel(
    x_ptr,  # (rows, K), any float dtype
    values_ptr,  # (rows, K) uint8, out: E4M3
    scales_ptr,  # (rows, ceil(K/32)) uint8, out: E8M0
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of 32 elements of one row. Grid: (rows, ceil(ceil(K/32) / BLOCKS))."""
    SCALES: tl.constexpr = (K + 31) // 32
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = to_f32(tl.load(x_ptr + row * K + k, mask=k < K, other=0.0))
    value, byte = quantize_blocks(x)
    tl.store(values_ptr + row * K + k, value, mask=k < K)
    tl.store(scales_ptr + row * SCALES + block, byte, mask=block < SCALES)
