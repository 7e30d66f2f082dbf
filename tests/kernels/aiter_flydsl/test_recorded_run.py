"""AITER's two real kernels on one block (recorded from its gfx950 code) against this package's oracle.

That pins what the weights, scales and gate function mean to AITER, down to the rounding of bfloat16.
"""

from __future__ import annotations

import torch
from aiter_vectors import vectors
from torch import Tensor

from moe_compile.kernels import mxfp8, reference
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

GATE = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)


def floats(name: str) -> Tensor:
    return vectors()[name].view(torch.bfloat16)


def packed() -> PackedExperts:
    run = vectors()
    return PackedExperts(
        run["run_w1_e4m3"].view(torch.float8_e4m3fn),
        run["run_w1_scale"],
        run["run_w2_e4m3"].view(torch.float8_e4m3fn),
        run["run_w2_scale"],
    )


def stage1(gate: GateFunction) -> Tensor:
    """(T, K, I) in float64."""
    run = vectors()
    x = mxfp8.dequantize(run["run_x_e4m3"].view(torch.float8_e4m3fn), run["run_x_scale"], torch.float64)
    gate_up, _ = reference.dequantized(packed(), torch.float64)
    products = torch.einsum("th,tknh->tkn", x, gate_up[run["run_topk_ids"].long()])
    return gate(*products.chunk(2, -1))


def test_activations_are_quantised_as_ours_are() -> None:
    run = vectors()
    for values, elements, scale in (
        (floats("run_x_bf16"), "run_x_e4m3", "run_x_scale"),
        (floats("run_stage1_out_bf16").view(26, 128), "run_a2_e4m3", "run_a2_scale"),
    ):
        got, got_scale = mxfp8.quantize(values)
        assert torch.equal(got.view(torch.uint8), run[elements])
        assert torch.equal(got_scale, run[scale])


def test_stage_1_is_the_gate_function_to_bf16_rounding() -> None:
    got, wanted = floats("run_stage1_out_bf16"), stage1(GATE).bfloat16()
    ulps = (got.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert (ulps == 0).float().mean() >= 0.999
    assert int(ulps.max()) <= 2


def test_the_recorded_values_tell_gate_functions_apart() -> None:
    """Else the test above would show nothing: the limit is reached, and without it or the offset all is different."""
    got = floats("run_stage1_out_bf16").double()
    for other in (
        GateFunction(alpha=1.702, up_offset=1.0),
        GateFunction(alpha=1.702, limit=7.0),
        GateFunction(limit=7.0, up_offset=1.0),
    ):
        assert (stage1(other) - got).norm() > 0.02 * got.norm()


def test_the_block_is_the_oracles_to_bf16_atomics() -> None:
    run = vectors()
    got = floats("run_stage2_out_bf16").double()
    wanted = reference.experts(
        floats("run_x_bf16"),
        run["run_topk_ids"],
        run["run_topk_weights"],
        packed(),
        GATE,
        activations="mxfp8",
        out_dtype=torch.float64,
        compute_dtype=torch.float64,
    )
    # Two expert outputs are rounded to bf16 and added in bf16: three roundings of 2**-9 at most, 3.1e-3 in all.
    assert (got - wanted).norm() <= 3.1e-3 * wanted.norm()
