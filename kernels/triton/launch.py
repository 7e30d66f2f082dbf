"""A kernel launch as data, so that one description of it can be executed or compiled for a GPU that is absent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel and everything it is called with. ``arguments`` holds compile-time constants too, all by name."""

    kernel: Any  # what @triton.jit makes
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    overlap: bool = False  # NVIDIA: may start before the previous kernel has ended, see overlap.py


def execute(launches: Iterable[Launch], device: torch.device) -> None:
    """Run the launches in order on the current stream of ``device``. Triton launches on the *current* GPU."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            options = {"launch_pdl": True} if launch.overlap else {}
            launch.kernel[launch.grid](
                **launch.arguments, num_warps=launch.num_warps, num_stages=launch.num_stages, **options
            )
