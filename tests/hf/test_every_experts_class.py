"""Every experts class of transformers, in both spellings: recognised with the right formula, and right in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_experts import EXPERTS, HIDDEN, TOP_K, ExpertsClass, every_experts_class

from moe_compile import report
from moe_compile.demo import relative_error
from moe_compile.kernels.mxfp8 import dequantize, quantize

pytestmark = pytest.mark.hf

OAI = "silu(alpha=1.702, limit=7, up_offset=1)"
# (gate function, layout, transposed) where it is not plain SwiGLU on concatenated (E, 2I, H) weights.
FORMULAS = {
    "aria": ("silu", "concatenated", True),
    "deepseek_v4": ("silu(limit=10)", "concatenated", False),
    "diffusion_gemma": ("gelu_tanh", "concatenated", False),
    "gemma4": ("gelu_tanh", "concatenated", False),
    "glm5_next": ("silu(limit=10)", "concatenated", False),
    "gpt_oss": (OAI, "interleaved", True),
    "hy_v4": ("silu(limit=10)", "concatenated", False),
    "hy_v4_vl": ("silu(limit=10)", "concatenated", False),
    "inkling2": ("silu(gate_softcap=4, up_softcap=25)", "concatenated", False),
    "inkling2_loop": ("silu(gate_softcap=4, up_softcap=25)", "concatenated", False),
    "minimax_m3_vl": (OAI, "concatenated", False),
    "nemotron_h": ("relu2(gated=False)", "concatenated", False),
    "openai_privacy_filter": (OAI, "concatenated", True),
}
# Left alone: the operator has no norm between the down projection and the routing weights.
LEFT_ALONE = {"muse_spark": "which is not one routing weight a row"}


def classes() -> list[ExpertsClass]:
    try:
        return list(every_experts_class())
    except ImportError:  # no transformers: the marker skips what is collected
        return []


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = 2 * torch.randn(9, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(9, EXPERTS, generator=generator).topk(TOP_K).indices
    return hidden, ids, torch.rand(9, TOP_K, generator=generator).to(dtype)


def with_rounded_weights(module: torch.nn.Module) -> torch.nn.Module:
    rounded = copy.deepcopy(module)
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if weight.dim() == 3 and "bias" not in name:
                k_last = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
                values = dequantize(*quantize(k_last), dtype=weight.dtype)
                weight.copy_(values.transpose(1, 2) if module.is_transposed else values)
    return rounded


@pytest.mark.parametrize("spelling", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("experts", classes(), ids=lambda experts: experts.name)
def test_recognised_and_right(experts: ExpertsClass, spelling: str) -> None:
    module = experts.build(spelling, torch.float32)
    compiled = torch.compile(module, backend="moe_rocm", options={"inductor": False})
    args = inputs(torch.float32)
    with torch.no_grad():
        actual, original = compiled(*args), module(*args)
        rounded = with_rounded_weights(module)(*args)
    (layer,) = report.merge(report.reports()).layers
    assert layer.form == spelling
    if experts.model in LEFT_ALONE:
        assert layer.reason is not None
        assert LEFT_ALONE[experts.model] in layer.reason
        assert torch.equal(actual, original)
        return
    assert layer.reason is None
    assert layer.spec is not None
    formula = (str(layer.spec.gate), layer.spec.gate_up_layout, layer.spec.transposed)
    assert formula == FORMULAS.get(experts.model, ("silu", "concatenated", False))
    assert not layer.spec.up_first
    assert relative_error(actual, rounded) < 1e-5
    assert relative_error(actual, original) > 1e-3, "the weights were not rounded to MXFP8: nothing was replaced"


def test_the_table_names_models_that_exist() -> None:
    assert {experts.model for experts in classes()} >= {"minimax", "minimax_m2", "minimax_m3_vl", "mixtral"}
    newest = {experts.model for experts in classes()}
    if "hy_v4_vl" in newest:  # transformers 5.24 has them all
        assert set(FORMULAS) | set(LEFT_ALONE) <= newest
