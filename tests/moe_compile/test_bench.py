"""The benchmark's arithmetic and its refusals; times are measured on a GPU only, and never in a test."""

from __future__ import annotations

import pytest
import torch

from moe_compile.bench import Ceilings, Inputs, Measurement, Shape, cost, find_shape, line, parse_tokens, run_bench
from moe_compile.errors import BenchError


def test_named_and_free_shapes() -> None:
    m3 = find_shape("m3")
    assert (m3.hidden_size, m3.intermediate_size, m3.num_experts, m3.top_k) == (6144, 3072, 128, 4)
    free = find_shape("64x32x8x2")
    assert (free.hidden_size, free.intermediate_size, free.num_experts, free.top_k) == (64, 32, 8, 2)


@pytest.mark.parametrize("text", ["m4", "64x32x8", "64x32x8x9", "64x0x8x2", ""])
def test_unknown_shapes_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(BenchError, match=r"unknown shape .* m3, m3-tp4"):
        find_shape(text)


def test_the_nearest_shape_is_named() -> None:
    with pytest.raises(BenchError, match="Did you mean 'qwen3-235b'"):
        find_shape("qwen3-235")


def test_token_counts() -> None:
    assert parse_tokens("1, 16,256") == [1, 16, 256]
    for wrong in ("", "0", "1,,2", "a", "-1"):
        with pytest.raises(BenchError, match="positive numbers"):
            parse_tokens(wrong)


def test_cost_counts_each_expert_once() -> None:
    shape = Shape("s", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
    ids = torch.tensor([[0, 1], [1, 2], [0, 2]])
    inputs = Inputs(torch.zeros(3, 64, dtype=torch.bfloat16), ids, torch.ones(3, 2))
    nbytes, flops = cost(shape, inputs)
    elements = 3 * 64 * 32
    assert nbytes == 3 * elements + 3 * elements // 32 + 2 * 3 * 64 * 2  # three experts, their scales, x and out
    assert flops == 2 * 6 * elements


def test_ratio_and_bandwidth_of_a_measurement() -> None:
    m = Measurement("m3", 4, "triton", seconds=2e-6, floor=1e-6, nbytes=4_000_000, flops=10**9)
    assert m.ratio == 2
    assert m.bandwidth == 2e12
    assert "x 2.00" in line(m)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BenchError, match="there is none here"):
        run_bench(find_shape("m3"), [1], ["triton"], lambda m: None, Ceilings(1.0, 1.0))


def test_unknown_contender() -> None:
    with pytest.raises(BenchError, match="unknown contender 'tritn'.*Did you mean 'triton'"):
        run_bench(find_shape("m3"), [1], ["tritn"], lambda m: None)
