"""The one weight format that every kernel of this package reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedExperts:
    """Canonical MXFP8 expert weights: gate rows first, then up rows, K (the contracted dimension) last, contiguous.

    E experts, H hidden size, I intermediate size. Scales are E8M0 bytes, one per 32 elements of K. A block without a
    gate has I instead of 2I rows in ``gate_up``.
    """

    gate_up: torch.Tensor  # (E, 2I, H) float8_e4m3fn
    gate_up_scale: torch.Tensor  # (E, 2I, ceil(H/32)) uint8
    down: torch.Tensor  # (E, H, I) float8_e4m3fn
    down_scale: torch.Tensor  # (E, H, ceil(I/32)) uint8
    gate_up_bias: torch.Tensor | None = None  # (E, 2I), any float dtype
    down_bias: torch.Tensor | None = None  # (E, H)

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.down.shape[2]

    @property
    def nbytes(self) -> int:
        tensors = (self.gate_up, self.gate_up_scale, self.down, self.down_scale, self.gate_up_bias, self.down_bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
