import pytest
import torch
from triton_probes import hard_to_quantize, quantize

from moe_compile.kernels import mxfp8


@pytest.mark.parametrize("k", [32, 96, 100, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_equal_the_torch_quantiser(dtype: torch.dtype, k: int) -> None:
    x = hard_to_quantize(dtype, k)
    values, scales = quantize(x)
    expected_values, expected_scales = mxfp8.quantize(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values, expected_values.view(torch.uint8))
