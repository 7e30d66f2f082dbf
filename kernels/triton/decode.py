# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""MXFP8 in registers, by integer operations on bytes.

``tl.float8e4nv`` is not used anywhere: sm_80 cannot cast it, gfx942's native FP8 is another format (fnuz, with another
bias and other NaNs), and Triton's interpreter drops its subnormals. Bits read as integers mean the same on all of them.
"""

import triton
import triton.language as tl

# Triton's interpreter (3.6 to 3.9) keeps bfloat16 as uint16: its `tl.dot` multiplies those integers, and its casts
# from float32 do not round to even. Under it the functions below work on float32 and on bits instead.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def e4m3_to_f32(byte):
    """uint8 -> float32, exact; 0x7F and 0xFF are NaN."""
    bits = byte.to(tl.uint32)
    exponent_mantissa = bits & 0x7F
    # Exponent bias 7 -> 127. The subnormals are mantissa * 2**-9: as integers, so that no float subnormal is read.
    normal = ((exponent_mantissa << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    subnormal = exponent_mantissa.to(tl.float32) * 0.001953125
    magnitude = tl.where(exponent_mantissa < 8, subnormal, normal)
    magnitude = tl.where(exponent_mantissa == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude)


@triton.jit
def e4m3_to_f16(byte, HARDWARE: tl.constexpr):
    """uint8 -> float16, exact; 0x7F and 0xFF are NaN. HARDWARE: sm_89 or later, one conversion for two elements."""
    if HARDWARE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = byte.to(tl.uint16)
        # Exponent bias 7 read with 15, subnormals too.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float16))


@triton.jit
def relative_scales(byte, offset, HARDWARE: tl.constexpr):
    """(N, B) uint8, (N, B) int32 -> float16 ``2**(byte + offset - 15)``, 0.0 where byte + offset <= 0; at most 30."""
    if HARDWARE:
        # Four bytes to two pairs: add, clamp at 0, into the exponent. 9 % fewer instructions in the whole loop.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, z;
            mov.b32 z, 0;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            add.s16x2 a, a, $3;
            add.s16x2 b, b, $4;
            max.s16x2 a, a, z;
            max.s16x2 b, b, z;
            shl.b32 $0, a, 10;
            shl.b32 $1, b, 10;
            }
            """,
            "=r,=r,r,r,r",
            [byte, offset.to(tl.int16)],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        exponent = byte.to(tl.int32) + offset
        return (tl.where(exponent > 0, exponent, 0) << 10).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e8m0_to_f32(byte):
    """uint8 -> float32 ``2**(byte - 127)``, exact: byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    bits = byte.to(tl.uint32)
    scale = bits << 23
    scale = tl.where(bits == 0, 0x00400000, scale)
    scale = tl.where(bits == 255, 0x7FC00000, scale)
    return scale.to(tl.float32, bitcast=True)


@triton.jit
def decode_rows(byte, scale_byte, ROWS: tl.constexpr, K: tl.constexpr):
    """(ROWS, K) E4M3 and (ROWS, K/32) E8M0 bytes -> (ROWS, K) float32, ``element * 2**(byte - 127)``.

    A product is exact in bfloat16 too, if it is at least 2**-130: an element has four significant bits.
    """
    scale = tl.broadcast_to(e8m0_to_f32(scale_byte)[:, :, None], (ROWS, K // 32, 32))
    return e4m3_to_f32(byte) * tl.reshape(scale, (ROWS, K))


@triton.jit
def decode_columns(byte, scale_byte, K: tl.constexpr, COLUMNS: tl.constexpr):
    """(K, COLUMNS) E4M3 and (K/32, COLUMNS) E8M0 bytes -> (K, COLUMNS) float32."""
    scale = tl.broadcast_to(e8m0_to_f32(scale_byte)[:, None, :], (K // 32, 32, COLUMNS))
    return e4m3_to_f32(byte) * tl.reshape(scale, (K, COLUMNS))


@triton.jit
def to_f32(x):
    """Any float dtype -> float32, exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> ``dtype``, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32. float32 operands are not rounded to TF32."""
    if INTERPRETED:
        return acc + tl.dot(to_f32(a), to_f32(b), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def power_of_two(exponent):
    """int32 in -126..127 -> float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def half_exponent(magnitude):
    """Biased exponent ``e`` of float32 bits without sign, such that ``2**(141 - e)`` brings them into [2**14, 2**15).

    At least 15, so that this power and its inverse are normal numbers.
    """
    exponent = magnitude >> 23
    return tl.where(exponent > 15, exponent, 15)
