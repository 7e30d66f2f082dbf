"""Which experts live on this rank, in the two forms that kernels ask for, and the one conversion between them.

An `ExpertMap` says where each expert is; an `ExpertMask` says only which ones are here. Both are integer tensors over
the global experts, and a kernel that is given one for the other computes a wrong result without an error: so they are
two types, and `mask_of` is the only way from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError


@dataclass(frozen=True)
class ExpertMap:
    """Global expert id to index into this rank's weights, -1 for an expert that is not here."""

    tensor: Tensor  # (E_global,) int32 or int64

    def __post_init__(self) -> None:
        if self.tensor.dim() != 1 or self.tensor.dtype not in (torch.int32, torch.int64):
            raise ExpertInputError(
                f"an expert map is (E_global,) int32 or int64, got {self.tensor.dtype} {tuple(self.tensor.shape)}"
            )

    @classmethod
    def identity(cls, num_experts: int, device: torch.device | str = "cpu") -> ExpertMap:
        """Every expert is here."""
        return cls(torch.arange(num_experts, dtype=torch.int32, device=device))

    @classmethod
    def of_range(cls, first: int, last: int, num_global: int, device: torch.device | str = "cpu") -> ExpertMap:
        """Experts ``first`` to ``last - 1`` of ``num_global`` are here, in order.

        Raises:
            ExpertInputError: ``0 <= first <= last <= num_global`` does not hold.
        """
        if not 0 <= first <= last <= num_global:
            raise ExpertInputError(f"experts {first} to {last} are no range of {num_global} global experts")
        ids = torch.arange(num_global, dtype=torch.int32, device=device)
        return cls(torch.where((ids >= first) & (ids < last), ids - first, -1))

    @property
    def num_global(self) -> int:
        return self.tensor.shape[0]

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """Global ids of any shape to local ones, -1 for experts elsewhere and for ids that name no expert.

        Reads nothing on the host, so it works while a graph is captured.
        """
        if self.num_global == 0:
            return torch.full_like(topk_ids, -1)
        known = (topk_ids >= 0) & (topk_ids < self.num_global)
        local = self.tensor[topk_ids.clamp(0, self.num_global - 1).long()].to(topk_ids.dtype)
        return torch.where(known, local, -1)


@dataclass(frozen=True)
class ExpertMask:
    """AITER's form: 1 for each global expert that is here, 0 elsewhere, and one more 0 at the end.

    That last entry is an expert that nobody has (``fake_id``): slots routed to it are dropped. The index into the
    weights is not stored: it is the number of ones before the expert, so the experts here are in global order.
    """

    tensor: Tensor  # (E_global + 1,) int32

    def __post_init__(self) -> None:
        if self.tensor.dim() != 1 or self.tensor.dtype != torch.int32 or self.tensor.shape[0] == 0:
            raise ExpertInputError(
                f"an expert mask is (E_global + 1,) int32, got {self.tensor.dtype} {tuple(self.tensor.shape)}"
            )

    @property
    def num_global(self) -> int:
        return self.tensor.shape[0] - 1

    @property
    def fake_id(self) -> int:
        return self.num_global

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """What AITER makes of ids in [0, fake_id]: the index into the weights, -1 where the mask is 0."""
        before = self.tensor.cumsum(0) - self.tensor
        chosen = topk_ids.long()
        return torch.where(self.tensor[chosen] == 1, before[chosen], -1).to(topk_ids.dtype)


def mask_of(expert_map: ExpertMap) -> ExpertMask:
    """The mask of a map. Reads the map on the host: for setting up, not for a captured forward.

    Raises:
        ExpertInputError: the local ids are not 0, 1, 2, ... in the order of the global ids. A mask cannot say that:
            take `ExpertMap.local_ids` first and the mask of the identity then, or reorder the weights.
    """
    present = expert_map.tensor >= 0
    local = expert_map.tensor[present].tolist()
    if local != list(range(len(local))):
        raise ExpertInputError(
            f"expert map with local ids {local} in global order: an expert mask needs 0 to {len(local) - 1} in order"
        )
    return ExpertMask(torch.cat([present.int(), present.new_zeros(1, dtype=torch.int32)]))


def local_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Indices into a rank's ``num_experts`` weights, int64 in the shape of ``topk_ids``; -1 for no such expert.

    ``expert_map``: (E_global,) integers as in `ExpertMap`; without one the ids are local. Reads nothing on the host.
    """
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.shape[0] - 1)], -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)
