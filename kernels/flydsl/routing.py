"""Which slots share a weight tile, in torch operators: no value is read on the host, so a graph can capture it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compile.kernels.expert_parallel import local_ids

TILE_SLOTS = 16  # columns of one scaled MFMA
# Up to this many slots each is a tile of its own: nothing is sorted, and few experts repeat.
MAX_UNSORTED_SLOTS = 32


@dataclass(frozen=True)
class Tiles:
    """Tiles of slots of one expert. ``direct``: tile b is slot b alone, and ``slots`` is not read."""

    local_ids: Tensor  # (S,) int32; -1 for a slot without an expert here
    expert: Tensor  # (tiles,) int32; -1 for an empty tile
    slots: Tensor  # (tiles, 16) int32; -1 for padding
    direct: bool

    @property
    def number(self) -> int:
        return self.expert.shape[0]


def tiles_of(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tiles:
    """Tiles of ``topk_ids`` (T, K) int32 or int64. Their number is a function of the shapes alone."""
    local = local_ids(topk_ids, expert_map, num_experts).reshape(-1).int()
    slots = local.numel()
    if slots <= MAX_UNSORTED_SLOTS:
        return Tiles(local, local, local, direct=True)
    device = local.device
    keys = torch.where(local < 0, num_experts, local).long()
    order = torch.argsort(keys, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:num_experts]
    first_slot = counts.cumsum(0) - counts
    tiles = (counts + TILE_SLOTS - 1) // TILE_SLOTS
    last_tile = tiles.cumsum(0)

    number = min(slots, max_tiles(slots, num_experts))
    tile = torch.arange(number, device=device)
    expert = torch.searchsorted(last_tile, tile, right=True)
    empty = expert == num_experts
    known = expert.clamp(max=num_experts - 1)
    within = (tile - (last_tile - tiles)[known])[:, None] * TILE_SLOTS + torch.arange(TILE_SLOTS, device=device)
    padding = empty[:, None] | (within >= counts[known][:, None])
    position = (first_slot[known][:, None] + within).clamp(0, slots - 1)
    return Tiles(
        local,
        torch.where(empty, -1, expert).int(),
        torch.where(padding, -1, order[position]).int(),
        direct=False,
    )


def max_tiles(slots: int, num_experts: int) -> int:
    """An upper bound on the tiles of ``slots`` sorted slots: each expert that has any may leave one partly empty."""
    return slots // TILE_SLOTS + min(slots, num_experts)
