"""Sharded expert weights (``DTensor``): the part that this rank holds, and splits that no rank can compute with.

transformers runs sharded experts on each rank's local part, so an expert block on a rank is an ordinary block with
fewer experts (expert parallelism) or a narrower intermediate (tensor parallelism), and partial results are summed after
it. One split looks the same and is wrong: rows cut straight through a weight that holds all gate rows before all up
rows. Then a rank pairs gate rows with gate rows, with shapes that are all as they should be. Only the placement of the
DTensor tells; weights that were cut by hand into plain tensors carry none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Placements = Sequence[tuple[Any, int]]  # (placement, ranks along that dimension of the mesh)


def placements_of(tensor: torch.Tensor) -> Placements:
    """How a tensor is spread over ranks; empty for a plain tensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple((placement, int(mesh.size(i))) for i, placement in enumerate(placements))


@dataclass(frozen=True)
class ShardedInput:
    """An input of a graph that is a DTensor: shape and dtype of this rank's part, and how the whole is spread."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements


def sharded_inputs(inputs: Iterable[Any]) -> tuple[ShardedInput, ...]:
    """Those that are DTensors, once for each kind."""
    tensors = [one for one in inputs if isinstance(one, torch.Tensor) and placements_of(one)]
    found = [ShardedInput(tuple(local_part(one).shape), one.dtype, placements_of(one)) for one in tensors]
    return tuple(dict.fromkeys(found))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, the same object each time; any other tensor as it is."""
    if not placements_of(tensor):
        return tensor
    # Not to_local(): that makes a new view each time where gradients are on.
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def gate_up_problem(placements: Placements, rows_dim: int, gated: bool, layout: str) -> str | None:
    """Why a rank's part of an up projection has other rows than its experts need, or None.

    Args:
        placements: of the weight.
        rows_dim: its dimension of gate and up rows.
        gated, layout: as in :class:`moe_compile.spec.ExpertSpec`.
    """
    for placement, ranks in placements:
        if ranks == 1 or placement.is_replicate():
            continue
        if placement.is_partial():
            return f"its gate/up weight is a sum that is spread over {ranks} ranks ({placement})"
        if placement.dim != rows_dim or not gated or layout != "concatenated":
            continue
        if getattr(placement, "split_factor", 1) % 2 == 0:
            continue  # gate and up are cut each for itself
        return (
            f"its gate/up weight holds all gate rows before all up rows and is cut into {ranks} by {placement}, so a "
            "rank's gate and up rows do not belong together; cut each half (transformers' tensor-parallel style "
            "'packed_colwise')"
        )
    return None
