"""Bytes that AITER's own functions and kernels wrote, recorded from e4048607 (2026-08-22) with flydsl 0.3.1."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_FILE = Path(__file__).parents[1] / "kernels" / "aiter_flydsl" / "vectors.npz"


@functools.cache
def vectors() -> dict[str, Tensor]:
    """``about`` in the file says what each array is and how it was made."""
    with np.load(_FILE) as data:
        return {name: torch.from_numpy(data[name]) for name in data.files if name != "about"}
