from __future__ import annotations

import pytest
import torch
from triton_probes import decode_everything, every_element_and_scale

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
