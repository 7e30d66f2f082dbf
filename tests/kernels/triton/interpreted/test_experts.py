"""The whole block against the oracle. Uninitialised memory is NaN, so that nothing read too much goes unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from expert_cases import GATES, assert_matches_oracle, random_block, relative_error

from moe_compile.kernels.packed import PackedExperts
from moe_compile.kernels.triton.experts import experts

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNSORTED, SORTED = 3, 22  # tokens; with 3 experts a token, the one takes the unsorted kernels and the other the sorted


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on by default
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 33, 130])
def test_tokens(num_tokens: int) -> None:
    block = random_block(num_tokens, 2, 3, 32, 32, seed=num_tokens)
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_activations(dtype: torch.dtype, activations: str, num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 4, 64, 32, dtype=dtype)
    assert_matches_oracle(block, block.run(experts, activations=activations), activations)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden_size", "intermediate_size", "activations"),
    [
        pytest.param(2, 2, 4, 288, 160, "bf16", id="unsorted, more than one tile each way"),
        pytest.param(4, 2, 3, 100, 40, "bf16", id="unsorted, ragged"),
        pytest.param(2, 2, 3, 100, 40, "mxfp8", id="unsorted, ragged, quantised"),
        pytest.param(2, 10, 256, 32, 32, "bf16", id="unsorted, k10 of 256"),
        pytest.param(33, 2, 2, 288, 160, "bf16", id="sorted, more than one tile each way"),
        pytest.param(33, 2, 3, 100, 40, "bf16", id="sorted, ragged"),
        pytest.param(33, 2, 3, 100, 40, "mxfp8", id="sorted, ragged, quantised"),
        pytest.param(70, 1, 1, 33, 31, "bf16", id="sorted, one expert, short last blocks"),
        pytest.param(7, 10, 256, 32, 32, "bf16", id="sorted, k10 of 256"),
        pytest.param(150, 2, 2, 96, 96, "bf16", id="sorted, tiles of 128 slots"),
    ],
)
def test_sizes(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, activations: str
) -> None:
    block = random_block(num_tokens, top_k, num_experts, hidden_size, intermediate_size, bias=True)
    assert_matches_oracle(block, block.run(experts, activations=activations), activations)


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
@pytest.mark.parametrize("name", ["swiglu_oai", "softcaps", "relu", "relu2_ungated"])
def test_gate_functions_with_bias(name: str, num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 4, 32, 48, gate=GATES[name], dtype=torch.float32, bias=True)
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize(
    ("num_tokens", "absent"), [(UNSORTED, "gate_up_bias"), (UNSORTED, "down_bias"), (SORTED, "down_bias")]
)
def test_one_bias_without_the_other(num_tokens: int, absent: str) -> None:
    block = random_block(num_tokens, 3, 5, 32, 32, bias=True)
    fields = {**vars(block.packed), absent: None}
    block = replace(block, packed=PackedExperts(**fields))
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize(
    ("num_tokens", "weights_dtype"),
    [(UNSORTED, torch.bfloat16), (SORTED, torch.bfloat16), (UNSORTED, torch.float16), (SORTED, torch.float64)],
)
def test_id_and_weight_dtypes_strides_and_out_dtype(num_tokens: int, weights_dtype: torch.dtype) -> None:
    block = random_block(num_tokens, 3, 5, 32, 32)
    strided = block.hidden_states.T.contiguous().T
    topk_weights = block.topk_weights.repeat(1, 2)[:, :3].to(weights_dtype)
    block = replace(block, hidden_states=strided, topk_ids=block.topk_ids.int(), topk_weights=topk_weights)
    out = block.run(experts, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_matches_oracle(block, out.bfloat16())
    # Not 1e-7: the intermediate is bfloat16, and sums in float32 and float64 may fall on either side of a tie.
    assert relative_error(out, block.expected()) < 2e-4


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
def test_repeated_ids_within_a_row(num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 5, 32, 32)
    block = replace(block, topk_ids=block.topk_ids[:, [0, 0, 1]])
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
def test_expert_map(num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 4, 32, 32)
    ids = torch.randint(-1, 9, block.topk_ids.shape, generator=torch.Generator().manual_seed(5))
    block = replace(block, topk_ids=ids, expert_map=torch.tensor([2, -1, 0, 3, -1, 1, -1, 7]))
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize(("num_tokens", "activations"), [(UNSORTED, "bf16"), (SORTED, "bf16"), (SORTED, "mxfp8")])
def test_ids_without_an_expert_contribute_exactly_zero(num_tokens: int, activations: str) -> None:
    block = random_block(num_tokens, 3, 5, 32, 32)
    ids = block.topk_ids.clone()
    ids[0] = torch.tensor([-1, 5, 2**33])
    ids[1, 0] = -7
    block = replace(block, topk_ids=ids)
    out = block.run(experts, activations=activations)
    assert (out[0] == 0).all()
    assert_matches_oracle(block, out, activations)


@pytest.mark.parametrize(("num_tokens", "activations"), [(UNSORTED, "mxfp8"), (SORTED, "bf16"), (SORTED, "mxfp8")])
def test_nan_stays_where_it_belongs(num_tokens: int, activations: str) -> None:
    """An expert that nobody asked for is all NaN, and so is one token."""
    block = random_block(num_tokens, 3, 5, 32, 32, bias=True)
    topk_ids = torch.where(block.topk_ids == 4, 0, block.topk_ids)
    clean = replace(block, topk_ids=topk_ids).run(experts, activations=activations)
    poisoned = _poison_expert(block.packed, 4)
    hidden_states = block.hidden_states.clone()
    hidden_states[2] = torch.nan
    out = replace(block, topk_ids=topk_ids, packed=poisoned, hidden_states=hidden_states).run(
        experts, activations=activations
    )
    assert out[2].isnan().all()
    others = torch.arange(num_tokens) != 2
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_weights_reach_their_own_row_only(dtype: torch.dtype, num_tokens: int) -> None:
    block = random_block(num_tokens, 3, 5, 32, 32, dtype=dtype, gate=GATES["silu"])
    block.packed.down.view(torch.uint8)[:, 7, 3] = 0x7F
    block.packed.down_scale[:, 20, 0] = 255
    out = block.run(experts)
    expected = torch.zeros(32, dtype=torch.bool)
    expected[[7, 20]] = True
    assert torch.equal(out.isnan(), expected.expand(num_tokens, 32))


def _poison_expert(packed: PackedExperts, expert: int) -> PackedExperts:
    gate_up, down = packed.gate_up.view(torch.uint8).clone(), packed.down.view(torch.uint8).clone()
    gate_up[expert], down[expert] = 0x7F, 0xFF
    gate_up_scale, down_scale = packed.gate_up_scale.clone(), packed.down_scale.clone()
    gate_up_scale[expert], down_scale[expert] = 255, 255
    return replace(
        packed,
        gate_up=gate_up.view(torch.float8_e4m3fn),
        down=down.view(torch.float8_e4m3fn),
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


@pytest.mark.parametrize("num_tokens", [UNSORTED, SORTED])
def test_float16_takes_scales_beyond_its_range(num_tokens: int) -> None:
    """Elements times 2**20 overflow float16 and times 2**-30 vanish in it; the results do neither."""
    block = random_block(num_tokens, 3, 5, 32, 32, dtype=torch.float16, gate=GATES["silu"])
    hidden_states = block.hidden_states * 2.0**-10
    packed = replace(
        block.packed, gate_up_scale=block.packed.gate_up_scale + 10, down_scale=block.packed.down_scale - 10
    )
    block = replace(block, packed=packed, hidden_states=hidden_states, topk_weights=block.topk_weights * 2.0**10)
    assert_matches_oracle(block, block.run(experts))
    far = replace(block.packed, gate_up_scale=block.packed.gate_up_scale + 13)
    block = replace(block, packed=far, hidden_states=hidden_states * 2.0**-13)
    assert_matches_oracle(block, block.run(experts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_or_no_experts(dtype: torch.dtype) -> None:
    block = random_block(0, 3, 5, 32, 32, dtype=dtype)
    out = block.run(experts, out_dtype=torch.float32)
    assert out.shape == (0, 32)
    assert out.dtype == torch.float32
    block = random_block(3, 2, 5, 32, 32, dtype=dtype)
    none = PackedExperts(*(t[:0] for t in vars(block.packed).values() if t is not None))
    assert torch.equal(replace(block, packed=none).run(experts), torch.zeros(3, 32, dtype=dtype))


def test_auto_activations_are_bf16() -> None:
    block = random_block(3, 2, 5, 32, 32)
    assert torch.equal(block.run(experts, activations="auto"), block.run(experts, activations="bf16"))
