"""`torch.compile(backend="moe_rocm")` and the Hugging Face forward, down to AITER's entry point, as if on a gfx950."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiter_stand_in
import pytest
import torch
from torch import Tensor, nn

import moe_compile
from moe_compile import packed_weights
from moe_compile.errors import BackendRefused
from moe_compile.kernels import mxfp8
from moe_compile.target import Capabilities, Target

E, K, I = 4, 2, 128  # noqa: E741


class SwiGluOai(nn.Module):
    """Experts of MiniMax-M3's kind, one gathered weight matrix a slot."""

    def __init__(self, hidden: int, alpha: float = 1.702) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.alpha = alpha
        self.router = nn.Parameter(torch.randn(E, hidden, generator=generator) / hidden**0.5)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, hidden, generator=generator) * 4 / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, hidden, I, generator=generator) / I**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(x @ self.router.T, -1), K)
        rows = x.repeat_interleave(K, dim=0).unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up_proj[ids.reshape(-1)], rows).squeeze(-1).chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        rows = ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).unsqueeze(-1)
        rows = torch.bmm(self.down_proj[ids.reshape(-1)], rows).squeeze(-1) * weights.reshape(-1, 1)
        return rows.view(x.shape[0], K, -1).sum(1).to(x.dtype)

    def rounded(self) -> SwiGluOai:
        """With weights as MXFP8 holds them."""
        other = SwiGluOai(self.router.shape[1], self.alpha).bfloat16()
        for name in ("gate_up_proj", "down_proj"):
            values = mxfp8.dequantize(*mxfp8.quantize(getattr(self, name).detach()))
            getattr(other, name).data.copy_(values)
        return other


@pytest.fixture(autouse=True)
def gfx950(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packed_weights.clear()
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        found = Capabilities.detect()
        monkeypatch.setattr(Capabilities, "detect", classmethod(lambda cls: found))
        monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: cls("cuda", "gfx950")))
        yield
    packed_weights.clear()


def compiled_with(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="moe_rocm", options={"inductor": False, **options})


@torch.no_grad()
def test_auto_takes_aiter_and_the_result_is_the_models(caplog: pytest.LogCaptureFixture) -> None:
    model, x = SwiGluOai(256).bfloat16(), torch.randn(17, 256, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        out = compiled_with(model)(x)
    (report,) = moe_compile.reports()
    assert [layer.moe_backend for layer in report.layers] == ["aiter"]
    assert len(aiter_stand_in.calls) == 1
    wanted = model.rounded()(x)
    # Activations are rounded to MXFP8 as well, which the model with rounded weights does not do.
    assert (out - wanted).norm() < 0.06 * wanted.norm()
    assert [note[:38] for note in report.notes] == ["caution: aiter: no tuned configuration"]
    assert "wait too weakly" not in caplog.text


@torch.no_grad()
def test_a_hazard_is_in_the_report_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, x = SwiGluOai(6144).bfloat16(), torch.randn(3, 6144, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        compiled_with(model, moe_backend="aiter")(x)
    (report,) = moe_compile.reports()
    note, _ = report.notes
    assert note.startswith("caution: aiter: this block (H6144 I128 E4 k2) runs stage-1 kernels of AITER that wait")
    assert "(moe_backend='flydsl' or 'triton'; AITER's pull request 5561 appears to fix it" in note
    assert f"moe_rocm: {note}" in caplog.text
    assert "H6144 I128 E4 k2" in str(report)


@torch.no_grad()
def test_a_block_that_aiter_would_get_wrong_is_refused_before_anything_runs() -> None:
    model, x = SwiGluOai(256, alpha=1.5).bfloat16(), torch.randn(3, 256, dtype=torch.bfloat16)
    with pytest.raises(BackendRefused, match=r"this is silu\(alpha=1.5, limit=7, up_offset=1\)"):
        compiled_with(model, moe_backend="aiter")(x)
    assert aiter_stand_in.calls == []


@torch.no_grad()
def test_weights_that_change_are_packed_again_in_place() -> None:
    model, x = SwiGluOai(256).bfloat16(), torch.randn(17, 256, dtype=torch.bfloat16)
    compiled = compiled_with(model, moe_backend="aiter")
    before = compiled(x)
    model.down_proj.mul_(2)
    assert torch.equal(compiled(x), 2 * before)
    model.down_proj.data.mul_(2)
    moe_compile.refresh(model)
    assert torch.equal(compiled(x), 4 * before)
    assert len({call["w2"].data_ptr() for call in aiter_stand_in.calls}) == 1
    assert packed_weights.statistics().entries == 1


@pytest.mark.hf
@torch.no_grad()
def test_a_hugging_face_model(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    moe_compile.register_hf_experts()
    model = MixtralForCausalLM(config).bfloat16().eval()
    ids = torch.arange(12).view(1, 12)
    model.set_experts_implementation("grouped_mm")
    wanted = model(ids).logits
    model.set_experts_implementation("moe_rocm")
    got = model(ids).logits
    assert len(aiter_stand_in.calls) == 1
    assert (got - wanted).norm() < 0.06 * wanted.norm()
