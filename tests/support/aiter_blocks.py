"""One expert block as inputs of `moe_compile::aiter_experts`, and what must come out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compile.kernels import layouts, ops, reference
from moe_compile.spec import ExpertSpec, GateFunction

E, H, I, K = 6, 256, 128, 3  # noqa: E741
M3 = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)
operator = ops.operator("aiter")


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


class Block:
    """Inputs of the operator, and what must come out."""

    def __init__(
        self, tokens: int = 17, dtype: torch.dtype = torch.bfloat16, gate: GateFunction = M3, intermediate: int = I
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.spec = ExpertSpec(E, H, intermediate, K, gate=gate)
        self.hidden = randn(tokens, H).to(dtype)
        self.ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
        self.weights = torch.softmax(randn(tokens, K), -1)
        # Products of about 10, so that the limit is reached.
        self.gate_up = (randn(E, 2 * intermediate, H) / 2).to(dtype)
        self.down = (randn(E, H, intermediate) / 8).to(dtype)
        self.scales: dict[str, Tensor] = {}

    def run(self, ids: Tensor | None = None, **more: Any) -> Tensor:
        keywords = {**ops.attributes(self.spec), **self.scales, **more}
        out: Tensor = operator(
            self.hidden, self.ids if ids is None else ids, self.weights, self.gate_up, self.down, **keywords
        )
        return out

    def expected(self, ids: Tensor | None = None, expert_map: Tensor | None = None) -> Tensor:
        packed = layouts.pack_experts(self.spec, self.gate_up, self.down, **self.scales)
        return reference.experts(
            self.hidden,
            self.ids if ids is None else ids,
            self.weights,
            packed,
            self.spec.gate,
            expert_map=expert_map,
            activations="mxfp8",
            out_dtype=torch.float64,
            compute_dtype=torch.float64,
        )

    def error(self, ids: Tensor | None = None, **more: Any) -> float:
        return relative(self.run(ids, **more), self.expected(ids, more.get("expert_map")))
