"""FlyDSL on a machine without a GPU: it compiles for gfx950, and its scaled MFMA reads packed MXFP8 as it lies."""

from __future__ import annotations

from pathlib import Path

import flydsl.compiler as flyc
import pytest
import torch
from flydsl_gfx950 import code_object, flydsl_target, kernel_arguments, placeholder
from gfx950 import run_kernel

from moe_compile.kernels import mxfp8

pytestmark = pytest.mark.gfx950

ROWS, COLUMNS, K = 32, 48, 256


def test_scaled_mfma_reads_the_packed_format(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    # Scales that differ by row and by block: one taken from a neighbour shows.
    spread = 2.0 ** torch.randint(-6, 7, (ROWS + COLUMNS, K // 32), generator=generator)
    numbers = torch.randn(ROWS + COLUMNS, K, generator=generator) * spread.repeat_interleave(32, 1)
    (a, a_scale), (b, b_scale) = mxfp8.quantize(numbers[:ROWS]), mxfp8.quantize(numbers[ROWS:])
    out = torch.full((ROWS, COLUMNS), torch.nan)
    tensors = (a.view(torch.uint8), b.view(torch.uint8), a_scale, b_scale, out)

    with flydsl_target(tmp_path):
        from flydsl_tile import launch

        compiled = flyc.compile(launch, *map(placeholder, tensors), ROWS // 16, COLUMNS // 16, K)
        image = code_object(compiled)
    stats = run_kernel(image, {}, (ROWS // 16, COLUMNS // 16), kernel_arguments(*tensors), strict=True)

    assert stats["slack_ok"]
    assert not stats["races"]
    scaled = {name: count for name, count in stats["per_op"].items() if "mfma_scale" in name.lower()}
    assert sum(scaled.values()) == (ROWS // 16) * (COLUMNS // 16) * (K // 128), stats["per_op"]
    expected = mxfp8.dequantize(a, a_scale, torch.float64) @ mxfp8.dequantize(b, b_scale, torch.float64).T
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()
