"""Small mixture-of-experts models in plain PyTorch, spelled as transformers spells its experts forwards."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from moe_compile.kernels.mxfp8 import dequantize, quantize

T, H, I, E, K = 6, 64, 32, 4, 2  # noqa: E741  the legend of moe_compile.spec


class Experts(nn.Module):
    """``spelling``: grouped (sorted rows, one grouped GEMM) or batched (one gathered weight matrix a slot)."""

    def __init__(self, spelling: str = "grouped", limit: float | None = None) -> None:
        super().__init__()
        self.spelling = spelling
        self.limit = limit
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)  # (E, 2I, H)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) / I**0.5)  # (E, H, I)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return silu(gate) * up

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        forward = self.grouped if self.spelling == "grouped" else self.batched
        return forward(hidden_states, topk_ids, topk_weights)

    def grouped(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        top_k = topk_ids.size(-1)
        ids, order = torch.sort(topk_ids.reshape(-1))
        counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = hidden_states[order // top_k]
        rows = grouped_mm(rows, self.gate_up_proj.transpose(-2, -1), offs=offsets)
        rows = grouped_mm(self.gate(rows), self.down_proj.transpose(-2, -1), offs=offsets)
        rows = rows * topk_weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        rows = rows[inverse].view(hidden_states.size(0), top_k, H)
        return rows.sum(dim=1).to(hidden_states.dtype)

    def batched(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        top_k = topk_ids.size(-1)
        ids = topk_ids.reshape(-1)
        rows = hidden_states.repeat_interleave(top_k, dim=0)
        rows = torch.bmm(self.gate_up_proj[ids], rows.unsqueeze(-1)).squeeze(-1)
        rows = torch.bmm(self.down_proj[ids], self.gate(rows).unsqueeze(-1)).squeeze(-1)
        rows = rows * topk_weights.reshape(-1).unsqueeze(-1)
        return rows.view(hidden_states.size(0), top_k, H).sum(dim=1).to(hidden_states.dtype)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, spelling: str = "grouped", limit: float | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = Experts(spelling, limit)

    def forward(self, hidden_states: Tensor) -> Tensor:  # (T, H) -> (T, H)
        scores = torch.softmax(self.router(hidden_states).float(), dim=-1)
        topk_weights, topk_ids = torch.topk(scores, K, dim=-1)
        out: Tensor = self.experts(hidden_states, topk_ids, topk_weights.to(hidden_states.dtype))
        return out


class Block(nn.Module):
    """Experts without a router, the same each time: the quickest to compile. Takes what :func:`routed` gives."""

    def __init__(self, spelling: str = "batched") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(spelling).to(torch.bfloat16)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out: Tensor = self.experts(x, topk_ids, topk_weights)
        return out


def moe(
    spelling: str = "grouped", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, limit: float | None = None
) -> MoE:
    """The same weights for the same seed, whatever the spelling."""
    torch.manual_seed(seed)
    return MoE(spelling, limit).to(dtype)


def hidden_states(tokens: int = T, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (T, H), expert ids (T, K) and routing weights (T, K)."""
    topk_ids = torch.arange(K * tokens).view(-1, K) % E
    return hidden_states(tokens), topk_ids, torch.full((tokens, K), 0.5, dtype=torch.bfloat16)


def with_mxfp8_weights(model: MoE) -> MoE:
    """A copy whose expert weights are rounded to MXFP8: what the rewritten model computes, but for rounding."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for weight in (rounded.experts.gate_up_proj, rounded.experts.down_proj):
            weight.copy_(dequantize(*quantize(weight)))
    return rounded


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
