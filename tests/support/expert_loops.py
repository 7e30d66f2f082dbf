"""Experts as models write them without transformers' helpers: a loop over all experts of stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from expert_modules import representable
from graph_capture import Captured, capture
from torch import Tensor, nn

TOKENS, TOP_K, E, H, INTERMEDIATE = 6, 2, 4, 32, 64

Step = Callable[..., Any]


def _silu(expert: int, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _same(expert: int, value: Any) -> Any:
    return value


def _add_rows(out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    return out.index_add(0, token, rows.to(out.dtype))


@dataclass
class Steps:
    """The places at which a test changes the loop."""

    experts: list[int] = field(default_factory=lambda: list(range(E)))
    id_of: Step = _same  # expert, expert
    up_of: Step = _same
    down_of: Step = _same
    activation: Step = _silu
    inputs: Step = _same  # expert, rows
    token: Step = _same  # expert, rows that are added to
    slots: Step = _same  # expert, slots of the weights
    factors: Step = _same  # expert, (n, 1) weights
    result: Step = _same  # expert, weighted rows
    add: Step = _add_rows
    total: Step = _same


class LoopedExperts(nn.Module):
    """``form`` is "gathered" (one_hot, where, index_add) or "dense" (all tokens through all experts)."""

    up_proj: nn.Parameter  # (E, 2I, H), or (E, H, 2I) if transposed; exact in MXFP8
    down_proj: nn.Parameter  # (E, H, I), or (E, I, H)

    def __init__(self, form: str, steps: Steps, dtype: torch.dtype, transposed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        contracted = 1 if transposed else 2
        for weight, rows, columns in (("up_proj", 2 * INTERMEDIATE, H), ("down_proj", H, INTERMEDIATE)):
            value = (0.2 * torch.randn(E, rows, columns, generator=generator)).to(dtype)
            value = value.mT.contiguous() if transposed else value
            setattr(self, weight, nn.Parameter(representable(value, contracted)))
        self.form, self.steps, self.transposed = form, steps, transposed

    def mlp(self, expert: int, rows: Tensor) -> Tensor:
        up, down = self.up_proj[self.steps.up_of(expert, expert)], self.down_proj[self.steps.down_of(expert, expert)]
        if self.transposed:
            up, down = up.T, down.T
        gate, value = F.linear(rows, up).chunk(2, dim=-1)
        return F.linear(self.steps.activation(expert, gate, value), down)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        s = self.steps
        out = torch.zeros_like(hidden)
        masks = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        for expert in s.experts:
            number = s.id_of(expert, expert)
            if self.form == "dense":
                factors = torch.where(ids == number, weights, 0).sum(dim=-1, keepdim=True)
                out = out + s.result(expert, self.mlp(expert, s.inputs(expert, hidden)) * s.factors(expert, factors))
                continue
            slot, token = torch.where(masks[number])
            rows = s.inputs(expert, hidden[None, token].reshape(-1, H))
            factors = s.factors(expert, weights[token, s.slots(expert, slot), None])
            out = s.add(out, s.token(expert, token), s.result(expert, self.mlp(expert, rows) * factors))
        return s.total(0, out)


def routing(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids with one id twice in a row and one expert without tokens, and weights."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, H, generator=generator).to(dtype)
    ids = torch.tensor([[0, 1], [1, 3], [3, 3], [0, 3], [1, 0], [3, 1]])
    weights = torch.rand(TOKENS, TOP_K, generator=generator) + 0.1
    return hidden, ids, weights.to(dtype)


def capture_loop(
    form: str,
    decomposed: bool = False,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    dynamic: bool = False,
    **steps: Any,
) -> Captured:
    module = LoopedExperts(form, Steps(**steps), dtype, transposed)
    return capture(module, routing(dtype), decomposed=decomposed, dynamic=(0, 1, 2) if dynamic else ())
