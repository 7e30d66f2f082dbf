from __future__ import annotations

import pytest
import torch
from triton_probes import decode_everything, decode_half, every_element_and_scale

from moe_compile.kernels import mxfp8

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    return decode_everything("cpu")


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return mxfp8.dequantize(*every_element_and_scale("cpu"), torch.float64)


def test_every_element_under_every_scale_is_exact(decoded: Decoded, exact: torch.Tensor) -> None:
    f32, bf16, columns = decoded
    torch.testing.assert_close(f32, exact.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(columns, exact.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(bf16, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_holds_every_product_from_2_to_the_minus_130_on(decoded: Decoded, exact: torch.Tensor) -> None:
    _, bf16, _ = decoded
    held = (exact.abs() >= 2.0**-130) & (exact.abs() < 2.0**128)
    assert held.sum() > 60_000
    assert torch.equal(bf16.double()[held], exact[held])
    assert bf16[255].isnan().all()
    assert bf16[:, [0x7F, 0xFF]].isnan().all()


def test_half_elements_and_relative_scales() -> None:
    elements, scales = decode_half("cpu")
    exact = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).half()
    torch.testing.assert_close(elements, exact, rtol=0, atol=0, equal_nan=True)
    byte, base = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    steps = byte - base
    expected = torch.where(steps >= -21, 2.0 ** (steps.double() + 7), 0.0)
    below = steps <= 0  # the base is the largest byte of its row
    assert torch.equal(scales[below].double(), expected[below])
