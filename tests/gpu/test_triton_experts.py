"""The Triton expert kernels on a real GPU: the oracle sweep, CUDA graphs, synchronisation, large addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import GATES, Block, assert_matches_oracle, random_block, random_ids

from moe_compile.kernels import mxfp8
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (K, E, H, I): the real models at reduced sizes, with more than one tile in every direction.
M3_REDUCED = (4, 32, 768, 192)
M2_REDUCED = (8, 64, 384, 192)
M3_TP4 = (4, 128, 6144, 768)
GIB = 2**30


def experts(*args: Any, **options: Any) -> torch.Tensor:
    # Not at module level: this file is also collected where there is no Triton.
    from moe_compile.kernels.triton.experts import experts as triton_experts

    return triton_experts(*args, **options)


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """What `torch.empty` returns is NaN, so that nothing read too much goes unnoticed."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device="cuda").isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def m3_tp4() -> Block:
    """One full-size layer, 1.8 GB of weights; 300 tokens."""
    return random_block(300, *M3_TP4, device="cuda")


def take(block: Block, num_tokens: int) -> Block:
    return replace(
        block,
        hidden_states=block.hidden_states[:num_tokens],
        topk_ids=block.topk_ids[:num_tokens],
        topk_weights=block.topk_weights[:num_tokens],
    )


def needs_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory, {free / GIB:.0f} GiB are free")


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 16, 17, 64, 130, 512])
def test_tokens(num_tokens: int, dtype: torch.dtype, activations: str) -> None:
    for model in (M3_REDUCED, M2_REDUCED):
        block = random_block(num_tokens, *model, dtype=dtype, bias=True, device="cuda", seed=num_tokens)
        with uninitialized_memory_is_nan():
            out = block.run(experts, activations=activations)
        if num_tokens == 0:
            assert out.shape == (0, model[2])
        else:
            assert_matches_oracle(block, out, activations)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden_size", "intermediate_size"),
    [
        pytest.param(5, 3, 4, 100, 40, id="unsorted, ragged"),
        pytest.param(6, 10, 256, 96, 160, id="unsorted, k10 of 256"),
        pytest.param(70, 2, 3, 100, 40, id="m64, ragged"),
        pytest.param(300, 2, 2, 33, 31, id="m128, short last blocks"),
        pytest.param(70, 1, 1, 288, 160, id="one expert"),
        pytest.param(130, 10, 256, 96, 160, id="m16, k10 of 256"),
        pytest.param(2048, 4, 8, 320, 224, id="m128 and tails, three launches to sort"),
        pytest.param(1000, 4, 8, 640, 256, id="m128 and tails"),
        pytest.param(200, 2, 6, 384, 256, id="m64 and tails"),
        pytest.param(500, 4, 64, 512, 256, id="m64"),
        pytest.param(300, 4, 64, 512, 256, id="m32"),
    ],
)
def test_sizes(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype
) -> None:
    block = random_block(num_tokens, top_k, num_experts, hidden_size, intermediate_size, dtype=dtype, device="cuda")
    with uninitialized_memory_is_nan():
        out = block.run(experts)
    assert_matches_oracle(block, out)


@pytest.mark.parametrize("num_tokens", [5, 100])
@pytest.mark.parametrize("name", GATES)
def test_gate_functions(name: str, num_tokens: int) -> None:
    block = random_block(num_tokens, 4, 8, 256, 96, gate=GATES[name], dtype=torch.float32, bias=True, device="cuda")
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_full_size_m3_layer(m3_tp4: Block, activations: str, num_tokens: int) -> None:
    block = take(m3_tp4, num_tokens)
    assert_matches_oracle(block, block.run(experts, activations=activations), activations)


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("num_tokens", [5, 100])
def test_ids_without_an_expert_and_nan_elsewhere(num_tokens: int, activations: str) -> None:
    block = random_block(num_tokens, 3, 5, 256, 96, device="cuda")
    ids = torch.where(block.topk_ids == 4, 0, block.topk_ids)
    ids[0] = torch.tensor([-1, 5, 2**33])
    ids[1, 0] = -7
    block = replace(block, topk_ids=ids)
    with uninitialized_memory_is_nan():
        clean = block.run(experts, activations=activations)
    assert (clean[0] == 0).all()
    assert_matches_oracle(block, clean, activations)

    block.packed.gate_up.view(torch.uint8)[4] = 0x7F
    block.packed.down_scale[4] = 255
    hidden_states = block.hidden_states.clone()
    hidden_states[2] = torch.nan
    with uninitialized_memory_is_nan():
        out = replace(block, hidden_states=hidden_states).run(experts, activations=activations)
    assert out[2].isnan().all()
    others = torch.arange(num_tokens, device="cuda") != 2
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("num_tokens", [5, 100])
def test_expert_map(num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 4, 256, 96, device="cuda")
    ids = torch.randint(-1, 9, block.topk_ids.shape, device="cuda", dtype=torch.int32)
    block = replace(block, topk_ids=ids, expert_map=torch.tensor([2, -1, 0, 3, -1, 1, -1, 7], device="cuda"))
    assert_matches_oracle(block, block.run(experts))


def test_decoding_and_quantising_are_exact() -> None:
    from triton_probes import decode_everything, every_element_and_scale, hard_to_quantize, quantize

    f32, bf16, columns = decode_everything("cuda")
    exact = mxfp8.dequantize(*every_element_and_scale("cpu"), torch.float64)
    torch.testing.assert_close(f32.cpu(), exact.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(columns.cpu(), exact.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(bf16.cpu(), exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
    for dtype in DTYPES:
        for k in (96, 100):
            x = hard_to_quantize(dtype, k)
            values, scales = quantize(x.cuda())
            expected_values, expected_scales = mxfp8.quantize(x)
            assert torch.equal(scales.cpu(), expected_scales)
            assert torch.equal(values.cpu(), expected_values.view(torch.uint8))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs E4M3 conversions (sm_89)"
)
@pytest.mark.parametrize("num_tokens", [3, 40, 520, 1100])
def test_the_hardware_conversion_equals_the_portable_one(num_tokens: int) -> None:
    """Bit for bit, with every element byte (NaN too) and scales far apart."""
    from moe_compile.kernels.triton.experts import plan
    from moe_compile.kernels.triton.launch import execute
    from moe_compile.target import Target

    block = random_block(num_tokens, 4, 8, 512, 256, device="cuda")
    packed = block.packed
    every = torch.arange(256, device="cuda").to(torch.uint8)
    packed.gate_up.view(torch.uint8)[2, 1::2] = torch.where(every & 0x7F == 0x7F, 0, every).repeat(2)
    packed.down.view(torch.uint8)[2, 1::2] = every
    for scales in (packed.gate_up_scale, packed.down_scale):
        scales[3, :, 0] = 0
        scales[3, ::2, 1] += 15
    packed.down_scale[3, 5, 1] = 255
    arguments = (block.hidden_states, block.topk_ids, block.topk_weights, block.packed, block.gate)
    results = []
    for hardware in (True, False):
        out, launches = plan(*arguments, Target.of(block.hidden_states.device).arch)
        assert [x.arguments["HARDWARE"] for x in launches if "HARDWARE" in x.arguments][:2] == [True, True]
        forced = [
            replace(x, arguments={**x.arguments, "HARDWARE": hardware}) if "HARDWARE" in x.arguments else x
            for x in launches
        ]
        execute(forced, block.hidden_states.device)
        results.append(out)
    assert results[0].isnan().any()
    assert not results[0].isnan().all()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 130])
def test_a_captured_graph_replays_with_other_routing(num_tokens: int, activations: str) -> None:
    block = random_block(num_tokens, *M3_REDUCED, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    top_k, num_experts = M3_REDUCED[:2]

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block.run(experts, activations=activations)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block.run(experts, activations=activations)

    routings = {
        "random": random_ids(num_tokens, top_k, num_experts, generator),
        "again": random_ids(num_tokens, top_k, num_experts, generator),
        "one expert": torch.full((num_tokens, top_k), num_experts - 1, device="cuda"),
        "two experts": torch.arange(num_tokens * top_k, device="cuda").view(num_tokens, top_k) % 2,
        "nobody": torch.full((num_tokens, top_k), -1, device="cuda"),
        "some": torch.randint(-4, num_experts + 4, (num_tokens, top_k), generator=generator, device="cuda"),
    }
    for name, ids in routings.items():
        block.topk_ids.copy_(ids)
        block.hidden_states.normal_(generator=generator)
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, block.run(experts, activations=activations)), name
        if name != "nobody":
            assert_matches_oracle(block, replayed, activations)
        else:
            assert (replayed == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 130])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_a_call_does_not_wait_for_the_gpu(num_tokens: int, activations: str) -> None:
    block = random_block(num_tokens, *M3_REDUCED, device="cuda")
    expert_map = torch.arange(block.packed.num_experts, device="cuda")
    block = replace(block, expert_map=expert_map)
    first = block.run(experts, activations=activations)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = block.run(experts, activations=activations)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current() -> None:
    for num_tokens in (5, 100):
        block = random_block(num_tokens, *M3_REDUCED, device="cuda:1")
        out = block.run(experts)
        assert out.device == torch.device("cuda:1")
        assert_matches_oracle(block, out)


@pytest.mark.parametrize("num_tokens", [4, 40])
def test_weights_beyond_two_to_the_31_elements(num_tokens: int) -> None:
    """M3 without tensor parallelism: 128 * 6144 * 6144 elements. All experts but three are NaN."""
    needs_memory(16)
    num_experts, hidden_size, intermediate_size = 128, 6144, 3072
    small = random_block(num_tokens, 3, 3, hidden_size, intermediate_size, device="cuda")
    used = torch.tensor([0, 64, 127], device="cuda")

    def spread(packed: torch.Tensor, filler: int) -> torch.Tensor:
        out = torch.full((num_experts, *packed.shape[1:]), filler, dtype=torch.uint8, device="cuda")
        for expert, values in zip(used.tolist(), packed.view(torch.uint8), strict=True):
            out[expert] = values
        return out

    packed = PackedExperts(
        spread(small.packed.gate_up, 0x7F).view(torch.float8_e4m3fn),
        spread(small.packed.gate_up_scale, 255),
        spread(small.packed.down, 0x7F).view(torch.float8_e4m3fn),
        spread(small.packed.down_scale, 255),
    )
    assert packed.gate_up.numel() > 2**32
    assert packed.down.numel() > 2**31
    out = replace(small, packed=packed, topk_ids=used[small.topk_ids]).run(experts)
    assert_matches_oracle(small, out)


def test_partials_beyond_two_to_the_31_elements() -> None:
    """360 thousand slots of H = 6144. The last tokens are compared with the oracle."""
    needs_memory(24)
    block = random_block(90_000, 4, 4, 6144, 32, gate=GateFunction(), device="cuda")
    assert block.topk_ids.numel() * 6144 > 2**31
    out = block.run(experts)
    last = slice(-64, None)
    tail = replace(
        block,
        hidden_states=block.hidden_states[last],
        topk_ids=block.topk_ids[last],
        topk_weights=block.topk_weights[last],
    )
    assert_matches_oracle(tail, out[last])
