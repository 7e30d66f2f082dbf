from __future__ import annotations

import pytest
import torch
from expert_cases import random_ids

from moe_compile.kernels.triton import routing
from moe_compile.kernels.triton.launch import execute


def check_sorted(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int, tail_m: int = 0
) -> None:
    """The tables against a stable sort, block by block."""
    local = topk_ids.flatten().long()
    if expert_map is not None:
        known = (local >= 0) & (local < len(expert_map))
        local = torch.where(known, expert_map[local.clamp(0, len(expert_map) - 1)], -1)
    tables, launches = routing.sort_slots(topk_ids, expert_map, num_experts, block_m, tail_m)
    for part in filter(None, (tables.blocks, tables.tails)):
        for table in (part.slots, part.expert, part.count):
            table.fill_(-12345)
    execute(launches, topk_ids.device)

    blocks, tails = [], []
    for e in range(num_experts):
        slots = (local == e).nonzero().flatten().tolist()
        rest = len(slots) % block_m
        if rest <= tail_m:
            tails += [(e, slots[len(slots) - rest :])] if rest else []
            slots = slots[: len(slots) - rest]
        blocks += [(e, slots[first : first + block_m]) for first in range(0, len(slots), block_m)]
    check_blocks(tables.blocks, blocks)
    if tables.tails is not None:
        check_blocks(tables.tails, tails)


def check_blocks(actual: routing.Blocks, expected: list[tuple[int, list[int]]]) -> None:
    count = len(expected)
    assert actual.expert.tolist() == [e for e, _ in expected] + [-1] * (actual.number - count)
    assert actual.count.tolist() == [len(slots) for _, slots in expected] + [0] * (actual.number - count)
    for row, (_, slots) in zip(actual.slots.tolist(), expected, strict=False):
        assert row[: len(slots)] == slots
        assert row[len(slots) :] == [-12345] * (actual.block_m - len(slots))
    assert (actual.slots[count:] == -12345).all()


@pytest.fixture(params=["one launch", "three launches"], autouse=True)
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "three launches":
        monkeypatch.setattr(routing, "MAX_SLOTS_OF_ONE_LAUNCH", 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "block_m"),
    [
        pytest.param(1, 1, 1, 16, id="one slot"),
        pytest.param(65, 1, 1, 16, id="one expert"),
        pytest.param(33, 4, 7, 32, id="few experts, two chunks"),
        pytest.param(26, 10, 256, 16, id="more experts than a chunk has slots"),
        pytest.param(70, 8, 128, 64, id="five chunks"),
    ],
)
def test_tables(tokens: int, top_k: int, num_experts: int, block_m: int, dtype: torch.dtype) -> None:
    ids = random_ids(tokens, top_k, num_experts, torch.Generator().manual_seed(1))
    check_sorted(ids.to(dtype), None, num_experts, block_m)


@pytest.mark.parametrize(("block_m", "tail_m"), [(32, 16), (64, 32), (16, 0)])
def test_tails(block_m: int, tail_m: int) -> None:
    """Experts with nothing, a tail alone, whole blocks alone, both, and too long a rest."""
    counts = [0, 1, block_m, block_m + tail_m, 0, block_m + tail_m + 1, 2 * block_m + 1, block_m - 1]
    ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    check_sorted(ids[order][:, None].contiguous(), None, len(counts), block_m, tail_m)


def test_ids_without_an_expert_are_left_out() -> None:
    ids = torch.randint(-3, 9, (50, 3), generator=torch.Generator().manual_seed(2))
    ids[0, 0], ids[1, 0] = 2**40 + 1, -(2**40)  # also those that are a small number in 32 bits
    check_sorted(ids, None, 5, 16)
    check_sorted(torch.full((50, 3), -1), None, 5, 16)


def test_expert_map() -> None:
    expert_map = torch.tensor([-1, 3, 0, -1, 2, 1, 99, -1])  # 99: as little an expert as -1
    ids = torch.randint(-2, 11, (60, 3), generator=torch.Generator().manual_seed(3))
    check_sorted(ids, expert_map, 4, 16)


def test_all_slots_on_one_expert_and_repeated_ids() -> None:
    check_sorted(torch.full((40, 4), 3), None, 6, 64)


def test_scan_over_more_chunks_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SCAN_BLOCK", 2)
    check_sorted(random_ids(230, 3, 5, torch.Generator().manual_seed(4)), None, 5, 128)
