"""transformers' ``FP8Experts``: MXFP8 checkpoints run as they are, everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_hf_models as tiny
import torch

import moe_compile
from moe_compile import hf, packed_weights
from moe_compile.errors import UnsupportedExperts
from moe_compile.kernels import reference
from moe_compile.kernels.packed import PackedExperts

pytestmark = pytest.mark.hf

# Families whose experts FP8Experts computes: no bias, not transposed.
FAMILIES = ["mixtral", "minimax_m2", "minimax_m3_vl", "qwen3_moe", "deepseek_v3", "deepseek_v4", "glm4_moe", "olmoe"]
SCALES = [torch.uint8, torch.float8_e8m0fnu]


@pytest.fixture(autouse=True)
def registered() -> None:
    moe_compile.register_hf_experts()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, use_cache=False).logits
    return found


def experts_of(model: Any) -> Any:
    return next(iter(hf.dispatched_experts(model).values()))


def packs(monkeypatch: pytest.MonkeyPatch) -> list[PackedExperts]:
    """What the reference kernel is given."""
    seen: list[PackedExperts] = []
    kernel = reference.experts

    def spy(hidden: Any, ids: Any, weights: Any, packed: PackedExperts, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(packed)
        return kernel(hidden, ids, weights, packed, *args, **kwargs)

    monkeypatch.setattr(reference, "experts", spy)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_equals_the_quantised_one(family: str) -> None:
    ids = tiny.tokens(7)
    model = tiny.with_fp8_experts(family)
    assert type(experts_of(model)).__name__ == "FP8Experts"
    expected = logits(tiny.yardstick(tiny.build(family)), ids)
    assert tiny.relative_error(logits(model, ids), expected) < 2e-6


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
def test_no_second_copy_of_the_weights(scale_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = packs(monkeypatch)
    before = packed_weights.statistics().entries
    model = tiny.with_fp8_experts("minimax_m2", scale_dtype=scale_dtype)
    logits(model, tiny.tokens(7))
    logits(torch.compile(model, backend="eager", fullgraph=True), tiny.tokens(7))
    assert packed_weights.statistics().entries == before
    assert len(seen) == 4
    for packed, module in zip(seen, 2 * list(hf.live_experts(model).values()), strict=True):
        experts: Any = module
        assert packed.gate_up.data_ptr() == experts.gate_up_proj.data_ptr()
        assert packed.down.data_ptr() == experts.down_proj.data_ptr()
        assert packed.gate_up_scale.data_ptr() == experts.gate_up_proj_scale_inv.data_ptr()
        assert packed.down_scale.data_ptr() == experts.down_proj_scale_inv.data_ptr()


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("backend", ["inductor", "moe_rocm"])
def test_under_torch_compile(backend: str, scale_dtype: torch.dtype) -> None:
    model = tiny.with_fp8_experts("mixtral", scale_dtype=scale_dtype)
    ids = tiny.tokens(7)
    expected = logits(tiny.yardstick(tiny.build("mixtral")), ids)
    assert tiny.relative_error(logits(torch.compile(model, backend=backend, fullgraph=True), ids), expected) < 2e-6


def test_the_report_says_mxfp8_weights() -> None:
    report = moe_compile.explain(tiny.with_fp8_experts("mixtral"), tiny.tokens(3), use_cache=False)
    assert report.rewritten == 2
    assert report.layers[0].spec is not None
    assert report.layers[0].spec.weight_format == "mxfp8"


def float_scales(module: Any) -> None:
    """What bytes become in a parameter that was made without scale_fmt: 119 is read as 119.0."""
    numbers = module.down_proj_scale_inv.view(torch.uint8).float()
    module.down_proj_scale_inv = torch.nn.Parameter(numbers, requires_grad=False)


def missing_scales(module: Any) -> None:
    module.down_proj_scale_inv = None


def left_uninitialised(module: Any) -> None:
    """As from_pretrained leaves a scale that the checkpoint lacks."""
    module.down_proj._is_hf_initialized = True
    module.down_proj_scale_inv = torch.nn.Parameter(torch.empty_like(module.down_proj_scale_inv))


def short_scales(module: Any) -> None:
    scale = module.down_proj_scale_inv.detach()[:, :, :-1].contiguous()
    module.down_proj_scale_inv = torch.nn.Parameter(scale, requires_grad=False)


def packed_fp4(module: Any) -> None:
    module.down_proj = torch.nn.Parameter(module.down_proj.detach().view(torch.int8), requires_grad=False)


def static_activations(module: Any) -> None:
    module.activation_scheme = "static"


def another_model(module: Any) -> None:
    module.config.model_type = "muse_spark_text"


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "float scales": (float_scales, r'down_proj_scale_inv is float32, not E8M0 bytes.*"scale_fmt": "ue8m0"'),
    "no scales": (missing_scales, "down_proj_scale_inv is missing"),
    "uninitialised scales": (left_uninitialised, "down_proj_scale_inv is missing in the checkpoint"),
    "short scales": (short_scales, r"down_proj_scale_inv has shape \(8, 64, 2\), expected \(8, 64, 3\)"),
    "fp4": (packed_fp4, "down_proj is int8"),
    "static activations": (static_activations, "activation_scheme='static'"),
    "an experts class that FP8Experts does not compute": (another_model, "leave out the norm.*dequantize=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    break_it, reason = REFUSED[name]
    model = tiny.with_fp8_experts("mixtral")
    break_it(experts_of(model))
    with pytest.raises(UnsupportedExperts, match=rf"cannot run FP8Experts: .*{reason}"):
        logits(model, tiny.tokens(3))


def test_blocks_of_128_by_128_are_refused_and_never_read_as_e8m0() -> None:
    model = tiny.with_fp8_experts("mixtral", weight_block_size=(128, 128), scale_fmt="float")
    reason = r"gate_up_proj has float32 scales for blocks of \[128, 128\].*dequantize=True"
    with pytest.raises(UnsupportedExperts, match=reason):
        logits(model, tiny.tokens(3))


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
def test_triton_reads_the_checkpoints_own_bytes(scale_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_compile.kernels.triton import experts as triton_experts

    seen: list[PackedExperts] = []
    kernel = triton_experts.experts

    def spy(hidden: Any, ids: Any, weights: Any, packed: PackedExperts, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(packed)
        return kernel(hidden, ids, weights, packed, *args, **kwargs)

    monkeypatch.setattr(triton_experts, "experts", spy)
    monkeypatch.setenv("MOE_COMPILE_MOE_BACKEND", "triton")
    model = tiny.with_fp8_experts("mixtral", scale_dtype=scale_dtype).cuda()
    ids = tiny.tokens(7).cuda()
    before = packed_weights.statistics().entries
    expected = logits(tiny.yardstick(tiny.build("mixtral")).cuda(), ids)
    assert tiny.relative_error(logits(model, ids), expected) < 2e-3
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        assert tiny.relative_error(logits(compiled, ids), expected) < 2e-3
    assert packed_weights.statistics().entries == before
    experts: Any = experts_of(model)
    assert seen[0].gate_up.data_ptr() == experts.gate_up_proj.data_ptr()
    assert seen[0].down_scale.data_ptr() == experts.down_proj_scale_inv.data_ptr()
