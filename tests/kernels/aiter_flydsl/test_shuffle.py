"""AITER's weight and scale order: byte for byte what its own functions wrote (``vectors.npz``), and back."""

from __future__ import annotations

import pytest
import torch
from aiter_vectors import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_compile.kernels.aiter_flydsl import shuffle


def shuffled_weight(weight: Tensor, gate_and_up: bool) -> Tensor:
    out = torch.full_like(weight, 0xEE)
    shuffle.shuffle_weight_into(out, weight, gate_and_up)
    return out


def shuffled_scale(scale: Tensor, gate_and_up: bool) -> Tensor:
    experts, rows, columns = scale.shape
    out = torch.full(shuffle.scale_shape(experts * rows, columns), 0xEE, dtype=torch.uint8)
    shuffle.shuffle_scale_into(out, scale, gate_and_up)
    return out


@pytest.mark.parametrize(
    ("name", "gate_and_up"), [("h256_i128_w1", True), ("h256_i128_w2", False), ("h512_i384_w2", False)]
)
def test_weights_are_aiters_bytes(name: str, gate_and_up: bool) -> None:
    plain, wanted = vectors()[name], vectors()[f"{name}_shuffled"]
    assert torch.equal(shuffled_weight(plain, gate_and_up), wanted)
    assert torch.equal(shuffle.unshuffle_weight(wanted, gate_and_up), plain)
    assert not torch.equal(shuffled_weight(plain, not gate_and_up), wanted)


@pytest.mark.parametrize("sizes", ["h256_i128", "h512_i384"])
@pytest.mark.parametrize(("which", "gate_and_up"), [("w1", True), ("w2", False)])
def test_scales_are_aiters_bytes_where_it_defines_them_and_zero_elsewhere(
    sizes: str, which: str, gate_and_up: bool
) -> None:
    name = f"{sizes}_{which}_scale"
    plain, wanted, defined = vectors()[name], vectors()[f"{name}_shuffled"], vectors()[f"{name}_shuffled_defined"]
    got = shuffled_scale(plain, gate_and_up)
    assert got.shape == wanted.shape
    assert torch.equal(got[defined == 1], wanted[defined == 1])
    assert (got[defined == 0] == shuffle.PAD_SCALE).all()
    assert int((defined == 0).sum()) == got.numel() - plain.numel()
    assert torch.equal(shuffle.unshuffle_scale(got, *plain.shape, gate_and_up), plain)


def test_no_byte_of_i_384_is_left_as_the_allocator_had_it() -> None:
    """12 scale columns are padded to 16; whatever was in the memory before, the same bytes come out."""
    scale = torch.full((2, 256, 12), 127, dtype=torch.uint8)
    results = []
    for garbage in (0x00, 0xFF):
        out = torch.full(shuffle.scale_shape(512, 12), garbage, dtype=torch.uint8)
        shuffle.shuffle_scale_into(out, scale, False)
        results.append(out)
    assert torch.equal(*results)
    assert set(results[0].unique().tolist()) == {shuffle.PAD_SCALE, 127}


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 3),
    row_blocks=st.integers(1, 4),
    column_blocks=st.integers(1, 4),
    gate_and_up=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_round_trips(experts: int, row_blocks: int, column_blocks: int, gate_and_up: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    weight = random(experts, 32 * row_blocks, 32 * column_blocks)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        back = shuffle.unshuffle_weight(shuffled_weight(weight.view(dtype), gate_and_up), gate_and_up)
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), weight)
    scale = random(experts, 32 * row_blocks, column_blocks)
    got = shuffled_scale(scale, gate_and_up)
    assert got.numel() - scale.numel() <= (got == shuffle.PAD_SCALE).sum()
    assert torch.equal(shuffle.unshuffle_scale(got, *scale.shape, gate_and_up), scale)


def test_the_offset_of_a_scale_byte() -> None:
    """The formula by which AITER's kernels address scales, for all bytes of a tile and its neighbours."""
    rows, columns = 256, 16
    scale = torch.arange(rows * columns).remainder(251).to(torch.uint8).view(1, rows, columns)
    flat = shuffled_scale(scale, False).flatten()
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (row // 32 * (columns // 8) + column // 8) * 256
    offset = tile + column % 4 * 64 + row % 16 * 4 + column // 4 % 2 * 2 + row // 16 % 2
    assert torch.equal(flat[offset], scale[0])
