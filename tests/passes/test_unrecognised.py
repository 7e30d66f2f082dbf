"""Spellings that no matcher takes are reported, and ordinary uses of 3-D parameters are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_compile import report
from moe_compile.errors import RewriteRefused

E, K, H, I = 4, 2, 16, 32  # noqa: E741


class Experts(nn.Module):
    def __init__(self, spelling: Callable[[Experts, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(H, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, 2 * I, H) / 4)
        self.w2 = nn.Parameter(torch.randn(E, H, I) / 6)
        self.spelling = spelling

    def gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        return self.spelling(self, x, weights, ids)


def einsum(m: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    hidden = torch.einsum("tknh,th->tkn", m.w1[ids], x)
    return torch.einsum("tkhn,tkn,tk->th", m.w2[ids], m.gate(hidden), weights)


def matmul(m: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    hidden = (m.w1[ids] @ x[:, None, :, None]).squeeze(-1)
    return ((m.w2[ids] @ m.gate(hidden).unsqueeze(-1)).squeeze(-1) * weights.unsqueeze(-1)).sum(1)


def loop(m: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        share = ((ids == e) * weights).sum(-1, keepdim=True)
        out = out + (share * m.gate(x @ m.w1[e].t())) @ m.w2[e].t()  # weighted before the down projection
    return out


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        (einsum, "used in a product of a form that is not recognised"),
        (matmul, "used in a product of a form that is not recognised"),
        (loop, "a loop over experts"),
    ],
)
@pytest.mark.parametrize("decomposed", [False, True])
def test_reported_once_and_left_alone(
    spelling: Callable[[Experts, Tensor, Tensor, Tensor], Tensor], reason: str, decomposed: bool
) -> None:
    model, x = Experts(spelling), torch.randn(5, H)
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": decomposed})
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    (layer,) = report.merge(report.reports()).layers
    assert not layer.rewritten
    assert layer.reason is not None
    assert reason in layer.reason
    assert layer.location is not None
    assert layer.location.startswith("test_unrecognised.py:")


def test_strict_refuses_them() -> None:
    compiled = torch.compile(Experts(loop), backend="moe_rocm", options={"inductor": False, "strict": True})
    with torch.no_grad(), pytest.raises(RewriteRefused, match="a loop over experts"):
        compiled(torch.randn(5, H))


class Ordinary(nn.Module):
    """3-D parameters that are no experts: a batched product, a lookup that is added, one slice."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(3, 5, H))
        self.table = nn.Parameter(torch.randn(7, 3, 5))
        self.one = nn.Parameter(torch.randn(2, H, H))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = torch.bmm(x.expand(3, -1, -1), self.heads.transpose(1, 2))  # (3, T, 5)
        return (heads + self.table[positions].transpose(0, 1)).sum() + (x @ self.one[0]).sum()


def test_ordinary_uses_are_not_reported() -> None:
    compiled = torch.compile(Ordinary(), backend="moe_rocm", options={"inductor": False, "strict": True})
    with torch.no_grad():
        compiled(torch.randn(4, H), torch.tensor([0, 6, 2, 2]))
    assert report.merge(report.reports()).layers == ()
