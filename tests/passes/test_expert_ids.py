"""Expert ids outside [0, E): the graph must do with them what the operator does, which counts them as absent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_compile import report
from moe_compile.demo import relative_error
from moe_compile.kernels.mxfp8 import dequantize, quantize

E, K, H, I = 8, 2, 32, 32  # noqa: E741
CLAMPED = "where such ids are outside, the operator counts them as absent"


class Experts(nn.Module):
    """transformers' batched_mm with ids from outside, clamped into the table; ``masked`` says what zeroes sentinels."""

    def __init__(self, masked: str, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.bias = masked, bias
        self.w1 = nn.Parameter(dequantize(*quantize(torch.randn(E, 2 * I, H) / 5)))
        self.w2 = nn.Parameter(dequantize(*quantize(torch.randn(E, H, I) / 5)))
        self.b2 = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat, weights = ids.reshape(-1), weights.reshape(-1)
        sentinel, flat = flat >= E, flat.clamp(0, E - 1)
        rows = x.repeat_interleave(K, dim=0)
        hidden = torch.bmm(self.w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = hidden.chunk(2, dim=-1)
        if self.masked == "up":
            up = up.masked_fill(sentinel.unsqueeze(-1), 0.0)
        out = torch.bmm(self.w2[flat], (F.silu(gate) * (up + 1)).unsqueeze(-1)).squeeze(-1)
        if self.masked == "before bias":
            out = out.masked_fill(sentinel.unsqueeze(-1), 0.0)
        if self.bias:
            out = out + self.b2[flat]
        if self.masked == "after bias":
            out = out.masked_fill(sentinel.unsqueeze(-1), 0.0)
        if self.masked == "weights":
            weights = weights.masked_fill(sentinel, 0.0)
        return (out * weights.unsqueeze(-1)).view(-1, K, H).sum(1)


class Routed(nn.Module):
    """The same behind a router whose choice may be shown to be in range."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts, self.choose = Experts("nothing"), choose
        self.router = nn.Linear(H, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(self.router(x).sigmoid())
        return self.experts(x, ids, weights)


def run(module: nn.Module, *args: Tensor) -> tuple[report.LayerReport, Tensor, Tensor]:
    compiled = torch.compile(module, backend="moe_rocm", options={"inductor": False})
    with torch.no_grad():
        actual, expected = compiled(*args), module(*args)
    (layer,) = report.merge(report.reports()).layers
    return layer, actual, expected


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(4, H), torch.tensor([[0, 1], [E, E], [2, E], [7, 3]]), torch.rand(4, K)


@pytest.mark.parametrize(("masked", "bias"), [("nothing", False), ("up", False), ("before bias", True)])
def test_a_clamp_whose_sentinels_are_not_zeroed_is_left_alone(masked: str, bias: bool) -> None:
    layer, actual, expected = run(Experts(masked, bias), *inputs())
    assert layer.reason is not None
    assert CLAMPED in layer.reason
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("masked", "bias"), [("weights", False), ("weights", True), ("after bias", True), ("before bias", False)]
)
def test_a_clamp_whose_sentinels_are_zeroed_is_rewritten(masked: str, bias: bool) -> None:
    layer, actual, expected = run(Experts(masked, bias), *inputs())
    assert layer.rewritten, layer.reason
    assert relative_error(actual, expected) < 1e-5
    assert not bool(actual[1].any())


def test_a_clamp_after_topk_over_all_experts_changes_nothing() -> None:
    layer, actual, expected = run(Routed(lambda scores: scores.topk(K, dim=-1)), torch.randn(5, H))
    assert layer.rewritten, layer.reason
    assert relative_error(actual, expected) < 1e-5


def test_a_clamp_after_topk_over_more_columns_is_left_alone() -> None:
    choose = lambda scores: torch.cat([scores, scores], dim=-1).topk(K, dim=-1)  # noqa: E731
    layer, actual, expected = run(Routed(choose), torch.randn(5, H))
    assert layer.reason is not None
    assert CLAMPED in layer.reason
    assert torch.equal(actual, expected)
