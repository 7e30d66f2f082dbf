"""MXFP8 bytes against exact arithmetic (`mxfp8_oracle`), and the operators under fake tensors and torch.compile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mxfp8_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import mxfp8

FLOAT32_MAX = torch.finfo(torch.float32).max


def float32_bits(bits: list[int]) -> Tensor:
    signed = [b - 2**32 if b >= 2**31 else b for b in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def neighbours(value: float, ulps: int) -> list[float]:
    """Every float32 within ``ulps`` steps of a positive value."""
    bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
    steps = [bits + step for step in range(-ulps, ulps + 1) if 0 <= bits + step <= 0x7F7FFFFF]
    return [float(x) for x in float32_bits(steps).tolist()]


def assert_matches_oracle(x: Tensor) -> None:
    """Element and scale bytes of a matrix (N, K) equal the oracle's."""
    values, scales = mxfp8.quantize(x)
    expected_values, expected_scales = oracle.quantize(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.uint8
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    torch.testing.assert_close(values.view(torch.uint8), expected_values, rtol=0, atol=0)


def column(values: list[float]) -> Tensor:
    """(N, 1): each value a block of its own."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


# Scale bytes


def test_scale_is_right_within_4_ulp_of_every_step() -> None:
    # Where a floating-point log2 goes wrong. The smallest step of float32 is 448 * 2**-127, the largest 448 * 2**119.
    steps = [value for k in range(-127, 120) for value in neighbours(448.0 * 2.0**k, 4)]
    assert len(steps) == 247 * 9
    assert_matches_oracle(column(steps))


def test_every_byte_that_float32_can_reach() -> None:
    # Anything above 224 needs the step; 225 * 2**120 still is a float32, 448 * 2**120 is not.
    x = column([225.0 * 2.0 ** (byte - 127) for byte in range(248)])
    _, scales = mxfp8.quantize(x)
    assert scales.flatten().tolist() == list(range(248))
    assert_matches_oracle(x)


@pytest.mark.parametrize(
    ("amax", "byte"), [(448.0, 127), (449.0, 128), (150.0, 126), (224.0, 126), (0.0, 0), (FLOAT32_MAX, 247)]
)
def test_scale_of(amax: float, byte: int) -> None:
    _, scales = mxfp8.quantize(torch.tensor([amax, -amax / 3]))
    assert scales.tolist() == [byte]


@pytest.mark.parametrize("value", [1e-36, 1e-37, 1e-38, 1e-40, 1e-44, 2.0**-126, 2.0**-127, 2.0**-149, FLOAT32_MAX])
def test_extreme_values(value: float) -> None:
    assert_matches_oracle(torch.tensor([[value], [-value], [value / 3]]))
    assert_matches_oracle(torch.tensor([[value, -value, value / 3, 0.0, value / 500] * 7]))


def test_subnormals_survive_where_the_processor_flushes_them() -> None:
    x = float32_bits([*range(1, 0x00800000, 0x1357), *range(0x00800000, 0x09000000, 0x13579)])
    x = x[: len(x) // 64 * 64].reshape(-1, 64)
    values, scales = mxfp8.quantize(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        flushed_values, flushed_scales = mxfp8.quantize(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed_scales, scales)
    assert torch.equal(flushed_values.view(torch.uint8), values.view(torch.uint8))
    assert values.view(torch.uint8).count_nonzero() > 0.9 * x.numel()


# Elements


def test_ties_and_their_neighbours_at_every_element_exponent() -> None:
    points = []
    for low, high in zip(oracle.E4M3_VALUES, oracle.E4M3_VALUES[1:], strict=False):
        points += [float(low), *neighbours(float((low + high) / 2), 1)]
    assert len(points) == 126 * 4
    rows = [[448.0, *points[start : start + 31]] for start in range(0, len(points), 31)]
    rows = [row + [0.0] * (32 - len(row)) for row in rows]
    x = torch.tensor(rows)
    for scale in (1.0, 2.0**-100, 2.0**100):
        assert_matches_oracle(x * scale)
        assert_matches_oracle(-x * scale)


def test_ties_go_to_the_even_neighbour() -> None:
    # Halfway between 16 and 18, 18 and 20; then E4M3's subnormals, in steps of 2**-9.
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, -19.0, 0.5 * 2**-9, 1.5 * 2**-9, 2.5 * 2**-9, 7.5 * 2**-9])
    values, _ = mxfp8.quantize(x)
    assert values.float().tolist() == [448.0, 16.0, 20.0, -16.0, -20.0, 0.0, 2 * 2**-9, 2 * 2**-9, 8 * 2**-9]


def test_small_values_beside_a_large_one_are_kept() -> None:
    values, scales = mxfp8.quantize(torch.tensor([448.0] + [2e-3] * 31))
    assert scales.tolist() == [127]
    assert values.float().tolist() == [448.0] + [2.0**-9] * 31


def test_zeros_have_byte_zero_and_keep_their_sign() -> None:
    values, scales = mxfp8.quantize(torch.tensor([0.0, -0.0]))
    assert scales.tolist() == [0]
    assert values.view(torch.uint8).tolist() == [0x00, 0x80]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_that_is_not_finite_is_nan_and_alone(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(3, 96, dtype=dtype)
    x[1, 40] = bad
    values, scales = mxfp8.quantize(x)
    assert scales.tolist() == [[119, 119, 119], [119, 255, 119], [119, 119, 119]]
    assert values.view(torch.uint8)[1, 32:64].tolist() == [0x7F] * 32
    decoded = mxfp8.dequantize(values, scales)
    assert decoded[1, 32:64].isnan().all()
    assert (decoded.nan_to_num(1.0) == 1.0).all()


# Shapes and dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 64, 100])
def test_ragged_rows(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(5, k, generator=generator) * torch.exp(3 * torch.randn(5, k, generator=generator))
    assert_matches_oracle(x.to(dtype))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 40), (2, 0, 33)])
def test_empty(shape: tuple[int, ...]) -> None:
    values, scales = mxfp8.quantize(torch.empty(shape))
    assert values.shape == shape
    assert scales.shape == (*shape[:-1], mxfp8.scale_count(shape[-1]))
    assert mxfp8.dequantize(values, scales).shape == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).unsqueeze(1)[::7]
    assert_matches_oracle(x)


def test_strides_do_not_matter() -> None:
    x = torch.randn(70, 3, 5, generator=torch.Generator().manual_seed(0))
    values, scales = mxfp8.quantize(x.permute(1, 2, 0))
    expected_values, expected_scales = mxfp8.quantize(x.permute(1, 2, 0).contiguous())
    assert values.is_contiguous()
    assert scales.is_contiguous()
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_float64_is_rounded_to_float32_first() -> None:
    x = torch.tensor([448.0 + 1e-9, 1e300], dtype=torch.float64).unsqueeze(1)
    assert mxfp8.quantize(x)[1].tolist() == [[127], [255]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_any_float32_bit_patterns(bits: list[int]) -> None:
    assert_matches_oracle(float32_bits(bits).unsqueeze(0))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 254), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2**24 - 1)), min_size=1, max_size=40))
def test_any_finite_blocks(exponent: int, elements: list[tuple[int, int]]) -> None:
    # Exponents within reach of one scale, so that few elements round to zero. The 24 bits are sign and mantissa.
    bits = [max(exponent - below, 0) << 23 | (m & 0x7FFFFF) | (m >> 23) << 31 for below, m in elements]
    assert_matches_oracle(float32_bits(bits).unsqueeze(0))


# Decoding


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_256_scale_bytes(scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(scale_dtype)
    decoded = mxfp8.decode_scales(scales, dtype)
    assert decoded.dtype == dtype
    assert decoded[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(decoded[255])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_element_under_many_scales(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(6, 1)
    scales = torch.tensor([0, 1, 100, 127, 246, 255], dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    decoded = mxfp8.dequantize(codes.view(torch.float8_e4m3fn), scales, dtype)
    assert decoded.dtype == dtype
    # With bytes 0 and 1 some products are subnormal, and bfloat16's subnormal numbers end at 2**-133.
    rows = slice(2 if dtype == torch.bfloat16 else 0, None)
    expected = oracle.dequantize(codes, scales)[rows]
    torch.testing.assert_close(decoded.double()[rows], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", [1, 31, 33, 63, 64])
def test_ragged_rows_decode(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 256, (4, k), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (4, mxfp8.scale_count(k)), generator=generator, dtype=torch.uint8)
    expected = oracle.dequantize(codes, scales)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        decoded = mxfp8.dequantize(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), dtype)
        assert decoded.is_contiguous()
        torch.testing.assert_close(decoded.double(), expected, rtol=0, atol=0, equal_nan=True)


def test_float16_goes_through_float32() -> None:
    values = torch.tensor([[1.0, 448.0]]).to(torch.float8_e4m3fn)
    for byte, expected in (
        (103, [2.0**-24, 448 * 2.0**-24]),
        (134, [128.0, 57344.0]),
        (127 - 33, [0.0, 448 * 2.0**-33]),
    ):
        decoded = mxfp8.dequantize(values, torch.tensor([[byte]], dtype=torch.uint8), torch.float16)
        assert decoded.tolist() == torch.tensor([expected]).half().tolist()


# One expert at a time


class LargestTemporary(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any tensor wider than a byte that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.itemsize > 1:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("transposed", [False, True])
def test_quantize_experts_equals_quantize_with_temporaries_of_one_expert(transposed: bool) -> None:
    weight = torch.randn(7, 12, 40, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    expected_values, expected_scales = mxfp8.quantize(weight)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    with LargestTemporary() as largest:  # type: ignore[no-untyped-call]
        values, scales = mxfp8.quantize_experts(weight)
    assert largest.numel <= 12 * 64  # (12, 40), padded to whole blocks
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_quantize_experts_writes_in_place_into_rows_of_a_larger_tensor() -> None:
    weight = torch.randn(3, 4, 33, generator=torch.Generator().manual_seed(2))
    values = torch.zeros(3, 10, 33).to(torch.float8_e4m3fn)
    scales = torch.full((3, 10, 2), 7, dtype=torch.uint8)
    mxfp8.quantize_experts(weight, out=(values[:, 2:6], scales[:, 2:6]))
    expected_values, expected_scales = mxfp8.quantize(weight)
    assert torch.equal(values[:, 2:6].float(), expected_values.float())
    assert torch.equal(scales[:, 2:6], expected_scales)
    assert values.view(torch.uint8)[:, [0, 1, 6, 7, 8, 9]].count_nonzero() == 0
    assert (scales[:, [0, 1, 6, 7, 8, 9]] == 7).all()


# Fake tensors and torch.compile


@pytest.fixture
def compiled() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile(mxfp8.quantize, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()


def test_compiled_quantize_is_bit_equal_and_dynamic(compiled: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((5, 64), (9, 96), (2, 3, 64), (4, 33), (6, 47), (0, 64)):
        x = torch.randn(shape, generator=generator).bfloat16()
        values, scales = compiled(x)
        expected_values, expected_scales = mxfp8.quantize(x)
        assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


def test_compiled_dequantize_is_bit_equal() -> None:
    torch._dynamo.reset()
    compiled_dequantize = torch.compile(mxfp8.dequantize, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((5, 64), (3, 33), (7, 70)):
        values, scales = mxfp8.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
        expected = mxfp8.dequantize(values, scales, torch.bfloat16)
        assert torch.equal(compiled_dequantize(values, scales, torch.bfloat16), expected)


@pytest.mark.parametrize("shape", [(4, 64), (4, 33), (2, 3, 40), (0, 32)])
def test_fake_tensors(shape: tuple[int, ...]) -> None:
    real = mxfp8.quantize(torch.zeros(shape))
    with FakeTensorMode():
        fake = mxfp8.quantize(torch.empty(shape))
        decoded = mxfp8.dequantize(*fake, torch.bfloat16)
    for fake_tensor, real_tensor in zip(fake, real, strict=True):
        assert fake_tensor.shape == real_tensor.shape
        assert fake_tensor.stride() == real_tensor.stride() or not real_tensor.numel()
        assert fake_tensor.dtype == real_tensor.dtype
    assert decoded.shape == shape
    assert decoded.dtype == torch.bfloat16


# Errors

VALUES = torch.zeros(2, 40).to(torch.float8_e4m3fn)
SCALES = torch.zeros(2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mxfp8.quantize(torch.zeros(3, dtype=torch.int32)), "x is int32, expected one of float32, bfloat16"),
        (lambda: mxfp8.quantize(VALUES), "x is float8_e4m3fn"),
        (lambda: mxfp8.quantize(torch.tensor(1.0)), r"expected shape \(\.\.\., K\)"),
        (lambda: mxfp8.quantize_experts(torch.zeros(3, 4)), r"shape \(3, 4\), expected \(E, N, K\)"),
        (lambda: mxfp8.quantize_experts(torch.zeros(1, 2, 41), out=(VALUES[None], SCALES[None])), "expected .*41"),
        (lambda: mxfp8.quantize_experts(torch.zeros(1, 2, 40), out=(SCALES[None], SCALES[None])), "out is uint8"),
        (lambda: mxfp8.dequantize(SCALES, SCALES), "values are uint8, expected float8_e4m3fn"),
        (lambda: mxfp8.dequantize(VALUES, SCALES[:, :1]), r"shape \(2, 1\), expected \(2, 2\)"),
        (lambda: mxfp8.dequantize(VALUES, SCALES.float()), "scales are float32, expected E8M0 bytes as uint8"),
        (lambda: mxfp8.dequantize(VALUES, SCALES, torch.int8), "dtype is int8, expected one of float32"),
        (lambda: mxfp8.decode_scales(SCALES, torch.float16), "dtype is float16"),
    ],
)
def test_errors_name_the_value_and_the_choices(call: Any, message: str) -> None:
    with pytest.raises(ExpertInputError, match=message):
        call()
