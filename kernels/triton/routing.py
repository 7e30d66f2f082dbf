"""The sorted order of the slots, made on the device, with sizes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_compile.kernels.triton import routing_kernels
from moe_compile.kernels.triton.launch import Launch

CHUNK = 128  # slots per program: a (128, 128) comparison finds each slot's rank among equals
SCAN_BLOCK = 1024


@dataclass(frozen=True)
class SortedSlots:
    """Slots (``t * K + k``) ordered by local expert, cut into blocks of ``block_m`` that share an expert.

    | tensor | shape, int32 | meaning |
    |---|---|---|
    | slots | (S,) | slots by expert, in rising order within one; only those that have an expert, then anything |
    | block_expert | (B,) | local expert of each block, -1 for an unused block |
    | block_start | (B,) | first position of each block in ``slots`` |
    | block_end | (B,) | where the positions of the block's expert end; the block may end before |
    """

    slots: torch.Tensor
    block_expert: torch.Tensor
    block_start: torch.Tensor
    block_end: torch.Tensor
    block_m: int

    @property
    def num_blocks(self) -> int:
        return self.block_expert.shape[0]

    def arguments(self) -> dict[str, Any]:
        """As the grouped GEMM kernels take them."""
        return {
            "sorted_slots_ptr": self.slots,
            "block_expert_ptr": self.block_expert,
            "block_start_ptr": self.block_start,
            "block_end_ptr": self.block_end,
            "num_blocks": self.num_blocks,
        }


def max_blocks(num_slots: int, num_experts: int, block_m: int) -> int:
    """An upper bound on ``sum_e ceil(n_e / block_m)`` over all ``n_e >= 0`` with ``sum_e n_e <= num_slots``.

    Each of the at most min(S, E) experts that have slots wastes at most ``block_m - 1`` positions of its last block.
    """
    return (num_slots + min(num_slots, num_experts) * (block_m - 1)) // block_m


def sort_slots(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int
) -> tuple[SortedSlots, list[Launch]]:
    """Allocate the tables and describe the kernels that fill them. topk_ids (T, K) is contiguous and not empty."""
    num_slots = topk_ids.numel()
    num_chunks = -(-num_slots // CHUNK)
    num_blocks = max_blocks(num_slots, num_experts, block_m)

    def table(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_ids.device)

    result = SortedSlots(table(num_slots), table(num_blocks), table(num_blocks), table(num_blocks), block_m)
    counts, totals = table(num_experts, num_chunks), table(num_experts)
    ids = {
        "ids_ptr": topk_ids,
        "expert_map_ptr": expert_map,
        "NUM_EXPERTS": num_experts,
        "NUM_IDS": num_experts if expert_map is None else expert_map.shape[0],
    }
    padded = max(16, 1 << (num_experts - 1).bit_length())
    shape = {"num_slots": num_slots, "num_chunks": num_chunks, "E_PAD": padded, "CHUNK": CHUNK}
    return result, [
        Launch(routing_kernels.count_kernel, (num_chunks,), {**ids, **shape, "counts_ptr": counts}),
        Launch(
            routing_kernels.scan_kernel,
            (num_experts,),
            {"counts_ptr": counts, "totals_ptr": totals, "num_chunks": num_chunks, "BLOCK": SCAN_BLOCK},
        ),
        Launch(
            routing_kernels.place_kernel,
            (max(num_chunks, -(-num_blocks // CHUNK)),),
            {**ids, **shape, **result.arguments(), "counts_ptr": counts, "totals_ptr": totals, "BLOCK_M": block_m},
        ),
    ]
