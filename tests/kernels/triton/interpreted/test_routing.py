from __future__ import annotations

import pytest
import torch
from expert_cases import random_ids

from moe_compile.kernels.triton import routing
from moe_compile.kernels.triton.launch import execute


def check_sorted(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int) -> None:
    """The tables against a stable sort, block by block."""
    local = topk_ids.flatten().long()
    if expert_map is not None:
        known = (local >= 0) & (local < len(expert_map))
        local = torch.where(known, expert_map[local.clamp(0, len(expert_map) - 1)], -1)
    valid = (local >= 0) & (local < num_experts)
    order, launches = routing.sort_slots(topk_ids, expert_map, num_experts, block_m)
    for table in (order.slots, order.block_expert, order.block_start, order.block_end):
        table.fill_(-12345)
    execute(launches, topk_ids.device)

    expected = [slot for e in range(num_experts) for slot in (local == e).nonzero().flatten().tolist()]
    assert order.slots[: len(expected)].tolist() == expected
    assert (order.slots[len(expected) :] == -12345).all()
    assert len(expected) == valid.sum()
    position, blocks = 0, []
    for e in range(num_experts):
        end = position + int((local == e).sum())
        blocks += [(e, start, end) for start in range(position, end, block_m)]
        position = end
    table = torch.stack([order.block_expert, order.block_start, order.block_end], dim=1)
    assert [tuple(row) for row in table[: len(blocks)].tolist()] == blocks
    assert (order.block_expert[len(blocks) :] == -1).all()


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
