"""The sorted order of the slots, made on the device, with sizes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_compile.kernels.triton import routing_kernels
from moe_compile.kernels.triton.launch import Launch

CHUNK = 64  # slots per program: a (64, 64) comparison finds each slot's rank among equals
SCAN_BLOCK = 1024
MAX_SLOTS_OF_ONE_LAUNCH = 4096


@dataclass(frozen=True)
class Blocks:
    """B blocks of at most ``block_m`` slots that share an expert.

    | tensor | shape, int32 | meaning |
    |---|---|---|
    | slots | (B, block_m) | slots of each block, rising within an expert; behind the block's count, anything |
    | expert | (B,) | local expert of each block, -1 for an unused block |
    | count | (B,) | how many slots the block has |
    """

    slots: torch.Tensor
    expert: torch.Tensor
    count: torch.Tensor

    @classmethod
    def empty(cls, number: int, block_m: int, device: torch.device) -> Blocks:
        return cls(
            *(torch.empty(size, dtype=torch.int32, device=device) for size in ((number, block_m), number, number))
        )

    @property
    def number(self) -> int:
        return self.slots.shape[0]

    @property
    def block_m(self) -> int:
        return self.slots.shape[1]

    def arguments(self) -> dict[str, Any]:
        """As the grouped GEMM kernels take them."""
        return {
            "sorted_slots_ptr": self.slots,
            "block_expert_ptr": self.expert,
            "block_count_ptr": self.count,
            "num_blocks": self.number,
            "BLOCK_M": self.block_m,
        }


@dataclass(frozen=True)
class SortedSlots:
    """Slots (``t * K + k``) by local expert, in blocks.

    With ``tails``, what is left of an expert behind whole blocks goes there if it fits into one. So a second, smaller
    tile serves the many experts that have a few slots more than a block.
    """

    blocks: Blocks
    tails: Blocks | None = None

    def arguments(self) -> dict[str, Any]:
        """As the kernels that fill the tables take them."""
        tails = self.tails
        return {
            **self.blocks.arguments(),
            "tail_slots_ptr": None if tails is None else tails.slots,
            "tail_expert_ptr": None if tails is None else tails.expert,
            "tail_count_ptr": None if tails is None else tails.count,
            "num_tails": 0 if tails is None else tails.number,
            "TAIL_M": 0 if tails is None else tails.block_m,
        }


def max_blocks(num_slots: int, num_experts: int, block_m: int) -> int:
    """An upper bound on ``sum_e ceil(n_e / block_m)`` over all ``n_e >= 0`` with ``sum_e n_e <= num_slots``.

    Each of the at most min(S, E) experts that have slots wastes at most ``block_m - 1`` positions of its last block.
    """
    return (num_slots + min(num_slots, num_experts) * (block_m - 1)) // block_m


def empty_tables(topk_ids: torch.Tensor, num_experts: int, block_m: int, tail_m: int = 0) -> SortedSlots:
    """Memory for the tables of topk_ids (T, K); without tails if tail_m is 0."""
    num_slots, device = topk_ids.numel(), topk_ids.device
    blocks = Blocks.empty(max_blocks(num_slots, num_experts, block_m), block_m, device)
    return SortedSlots(blocks, Blocks.empty(min(num_slots, num_experts), tail_m, device) if tail_m else None)


def sort_arguments(
    tables: SortedSlots, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int
) -> tuple[int, dict[str, Any]]:
    """How many programs of ``sort_chunk`` fill the tables, and their arguments. Up to MAX_SLOTS_OF_ONE_LAUNCH slots."""
    num_slots = topk_ids.numel()
    padded = next((size for size in (64, 256, 1024) if num_slots <= size), MAX_SLOTS_OF_ONE_LAUNCH)
    if tables.tails is not None:
        padded = max(padded, 256)  # not by sort_few
    programs = 1 if padded <= CHUNK else _programs(tables, num_slots)
    return programs, {
        **_ids(topk_ids, expert_map, num_experts),
        **tables.arguments(),
        "num_slots": num_slots,
        "CHUNK": CHUNK,
        "S_PAD": padded,
    }


def sort_slots(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int, tail_m: int = 0
) -> tuple[SortedSlots, list[Launch]]:
    """Allocate the tables and describe the kernels that fill them. topk_ids (T, K) is contiguous and not empty."""
    tables = empty_tables(topk_ids, num_experts, block_m, tail_m)
    if topk_ids.numel() <= MAX_SLOTS_OF_ONE_LAUNCH:
        programs, arguments = sort_arguments(tables, topk_ids, expert_map, num_experts)
        return tables, [Launch(routing_kernels.sort_kernel, (programs,), arguments)]
    return tables, sort_many_slots(tables, topk_ids, expert_map, num_experts)


def sort_many_slots(
    tables: SortedSlots, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int
) -> list[Launch]:
    """Any number of slots: count, prefix sums, placement."""
    num_slots = topk_ids.numel()
    num_chunks = -(-num_slots // CHUNK)
    counts = torch.empty((num_experts, num_chunks), dtype=torch.int32, device=topk_ids.device)
    totals = torch.empty((num_experts,), dtype=torch.int32, device=topk_ids.device)
    ids = {**_ids(topk_ids, expert_map, num_experts), "num_slots": num_slots, "num_chunks": num_chunks, "CHUNK": CHUNK}
    return [
        Launch(routing_kernels.count_kernel, (num_chunks,), {**ids, "counts_ptr": counts}),
        Launch(
            routing_kernels.scan_kernel,
            (num_experts,),
            {"counts_ptr": counts, "totals_ptr": totals, "num_chunks": num_chunks, "BLOCK": SCAN_BLOCK},
        ),
        Launch(
            routing_kernels.place_kernel,
            (_programs(tables, num_slots),),
            {**ids, **tables.arguments(), "counts_ptr": counts, "totals_ptr": totals},
        ),
    ]


def _programs(tables: SortedSlots, num_slots: int) -> int:
    """Each places CHUNK slots and writes CHUNK entries of every table of blocks."""
    sizes = [num_slots, tables.blocks.number, 0 if tables.tails is None else tables.tails.number]
    return -(-max(sizes) // CHUNK)


def _ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> dict[str, Any]:
    return {
        "ids_ptr": topk_ids,
        "expert_map_ptr": expert_map,
        "NUM_EXPERTS": num_experts,
        "NUM_IDS": num_experts if expert_map is None else expert_map.shape[0],
        "E_PAD": max(16, 1 << (num_experts - 1).bit_length()),
    }
