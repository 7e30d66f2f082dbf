"""The main job on real transformers classes: MiniMax-M2 and M3, both spellings, with and without Inductor.

The yardstick is the same model with expert weights rounded to MXFP8 and back. In float32 the rewritten model equals it
to 1e-5 while the original is a hundred times further away, so agreement is no accident; in bf16 to bf16 rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import LAYERS, MODELS, relative_error, tokens, yardstick

from moe_compile import report

pytestmark = pytest.mark.hf

SPELLINGS = ["grouped_mm", "batched_mm"]


# (largest error against the yardstick, smallest against the original). In bf16 seen 4e-3 to 5e-3 and 1.6e-2 to 1.9e-2
# with MiniMax-M2, 6e-3 to 1.1e-2 and 2.9e-2 to 3.2e-2 with M3, whose three layers add four experts a token, doubled.
BOUNDS = {
    ("minimax_m2", torch.bfloat16): (1e-2, 1.2e-2),
    ("minimax_m3_vl_text", torch.bfloat16): (1.5e-2, 2e-2),
}


def check(model: Any, compiled: Any, inputs: list[torch.Tensor]) -> None:
    tight, quantised = BOUNDS.get((model.config.model_type, model.dtype), (1e-5, 1e-3))
    rounded = yardstick(model)
    with torch.no_grad():
        for ids in inputs:
            logits = compiled(ids, use_cache=False).logits
            expected = rounded(ids, use_cache=False).logits
            original = model(ids, use_cache=False).logits
            assert relative_error(logits, expected) < tight, ids.shape
            assert relative_error(logits, original) > quantised, "the experts were not replaced"
    merged = report.merge(report.reports())
    assert merged.from_cache == 0
    assert merged.skipped == 0
    assert merged.rewritten == LAYERS
    assert {layer.moe_backend for layer in merged.layers} == {"reference"}


@pytest.mark.parametrize(
    ("name", "spelling", "dtype"),
    [
        *((name, spelling, torch.bfloat16) for name in MODELS for spelling in SPELLINGS),
        ("minimax_m3", "grouped_mm", torch.float32),
        ("minimax_m2", "batched_mm", torch.float32),
    ],
)
def test_every_block_is_rewritten_without_inductor(name: str, spelling: str, dtype: torch.dtype) -> None:
    model = MODELS[name](spelling, dtype)
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": False})
    check(model, compiled, [tokens(7), tokens(9), tokens(5, batch=3), tokens(1)])


# Half a minute each on two cores; both spellings of both models run without Inductor above.
@pytest.mark.parametrize(("name", "spelling"), [("minimax_m3", "grouped_mm"), ("minimax_m2", "batched_mm")])
def test_every_block_is_rewritten_under_inductor(name: str, spelling: str) -> None:
    model = MODELS[name](spelling, torch.bfloat16)
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": {"force_disable_caches": True}})
    check(model, compiled, [tokens(7), tokens(9), tokens(1)])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_mark_dynamic_from_the_start(spelling: str) -> None:
    model = MODELS["minimax_m2"](spelling, torch.float32)
    compiled = torch.compile(model, backend="moe_rocm", dynamic=True, options={"inductor": False})
    check(model, compiled, [tokens(7), tokens(4, batch=2), tokens(11)])


def test_the_report_names_layers_sizes_and_gate_functions() -> None:
    model = MODELS["minimax_m3"]("grouped_mm", torch.bfloat16)
    compiled = torch.compile(model, backend="moe_rocm", options={"inductor": False})
    with torch.no_grad():
        compiled(tokens(6), use_cache=False)
    (only,) = report.reports()
    assert [layer.name for layer in only.layers] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    spec = only.layers[0].spec
    assert spec is not None
    assert spec.sizes == "H64 I96 E8 k4"
    assert str(spec.gate) == "silu(alpha=1.702, limit=7, up_offset=1)"
    assert not spec.up_first
    assert only.layers[0].location is not None
    assert only.layers[0].location.startswith("modeling_minimax_m3_vl.py:")
