"""``experts_implementation="moe_rocm"``: right on every family of experts, with and without torch.compile."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import tiny_hf_models as tiny
import torch

import moe_compile
from moe_compile import hf, hf_experts
from moe_compile.errors import BackendRefused, UnsupportedExperts
from moe_compile.kernels.ops import is_expert_operator
from moe_compile.kernels.reference import experts as reference_experts

pytestmark = pytest.mark.hf


@pytest.fixture(autouse=True)
def registered() -> None:
    moe_compile.register_hf_experts()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, use_cache=False).logits
    return found


def block(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """One experts module that runs our implementation."""
    return next(iter(hf.live_experts(tiny.build(family, "moe_rocm", dtype)).values()))


def inputs(module: Any, count: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, module.down_proj.shape[2 if module.is_transposed else 1], generator=generator)
    ids = torch.rand(count, module.down_proj.shape[0], generator=generator).argsort(-1)[:, :2]
    return hidden, ids, torch.rand(count, 2, generator=generator)


def test_both_registries_know_the_name_and_registering_again_changes_nothing() -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = [registry["moe_rocm"] for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)]
    moe_compile.register_hf_experts()
    after = [registry["moe_rocm"] for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)]
    assert before == after
    assert before[0] is not before[1]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_whole_model_without_torch_compile(family: str) -> None:
    model, original = tiny.build(family, "moe_rocm"), tiny.build(family)
    ids = tiny.tokens(7)
    expected = logits(tiny.yardstick(original), ids)
    assert tiny.relative_error(logits(model, ids), expected) < 2e-6
    assert tiny.relative_error(logits(original, ids), expected) > 1e-2, "the experts were not replaced"
    assert len(hf.live_experts(model)) == len(hf.dispatched_experts(model)) > 0
    assert not hf.live_experts(original)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "minimax_m3_vl"])
def test_any_compile_backend_sees_one_operator_a_layer(family: str) -> None:
    model = tiny.build(family, "moe_rocm")
    operators: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        operators.extend(node for node in gm.graph.nodes if is_expert_operator(node.target))
        return gm

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    yardstick = tiny.yardstick(tiny.build(family))
    for length in (7, 4):
        ids = tiny.tokens(length)
        assert tiny.relative_error(logits(compiled, ids), logits(yardstick, ids)) < 2e-6
    assert len(operators) == len(hf.live_experts(model))


def test_under_inductor() -> None:
    compiled = torch.compile(tiny.build("minimax_m2", "moe_rocm"), fullgraph=True)
    ids = tiny.tokens(7)
    assert tiny.relative_error(logits(compiled, ids), logits(tiny.yardstick(tiny.build("minimax_m2")), ids)) < 2e-6


def test_code_compiled_for_one_gate_function_is_not_used_for_another() -> None:
    first = tiny.build("minimax_m3_vl", "moe_rocm")
    second = tiny.build("minimax_m3_vl", "moe_rocm", swiglu_limit=0.25)
    ids = tiny.tokens(7)
    compiled = torch.compile(lambda model: model(ids, use_cache=False).logits, backend="eager", fullgraph=True)
    with torch.no_grad():
        for model in (first, second, first):
            assert torch.equal(compiled(model), model(ids, use_cache=False).logits)
    assert tiny.relative_error(logits(second, ids), logits(first, ids)) > 1e-4


def test_explain_counts_blocks_that_call_the_operator() -> None:
    report = moe_compile.explain(tiny.build("gpt_oss", "moe_rocm"), tiny.tokens(7), use_cache=False)
    assert (report.rewritten, report.skipped) == (2, 0)
    layer = report.layers[0]
    assert (layer.name, layer.form, layer.moe_backend) == (
        "model.layers.0.mlp.experts",
        "experts_operator",
        "reference",
    )
    assert layer.spec is not None
    assert layer.spec.sizes == "H64 I96 E8 k2"
    assert (layer.spec.transposed, layer.spec.gate_up_layout, layer.spec.has_bias) == (True, "interleaved", True)
    assert str(layer.spec.gate) == "silu(alpha=1.702, limit=7, up_offset=1)"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_comes_from_grouped_mm_and_that_is_said(
    family: str, compiled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_experts, "_said", set())
    model, original = tiny.build(family, "moe_rocm"), tiny.build(family, "grouped_mm")
    call = torch.compile(model, backend="aot_eager") if compiled else model
    ids = tiny.tokens(7)
    with caplog.at_level(logging.WARNING, "moe_compile.hf"):
        call(ids, use_cache=False).logits.square().sum().backward()
    original(ids, use_cache=False).logits.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert [r.message for r in caplog.records if "a gradient is needed" in r.message and "no_grad" in r.message]


def test_sentinel_ids_contribute_exactly_zero() -> None:
    module = block("gpt_oss")
    hidden, ids, weights = inputs(module)
    with torch.no_grad():
        ids[0] = torch.tensor([8, 8])  # an expert-parallel sentinel is E
        ids[1, 1] = -1
        module.down_proj[int(ids[2, 0])] = float("nan")
        module._is_expert_parallel = True
        out = module(hidden, ids, weights)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        alone = module(hidden[1:2], ids[1:2, :1], weights[1:2, :1])
        torch.testing.assert_close(out[1:2], alone)


def test_no_tokens_give_an_empty_result() -> None:
    module = block("mixtral")
    with torch.no_grad():
        out = module(torch.empty(0, 64), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert out.shape == (0, 64)


def test_experts_without_a_gate() -> None:
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = NemotronHConfig(hidden_size=64, moe_intermediate_size=96, n_routed_experts=8)
    module = NemotronHExperts(config)
    tiny.randomise(module)
    hidden, ids, weights = inputs(module)
    rounded = tiny.yardstick(module)
    with torch.no_grad():
        config._experts_implementation = "moe_rocm"
        out = module(hidden, ids, weights)
        rounded.config._experts_implementation = "grouped_mm"
        expected = rounded(hidden, ids, weights)
    assert tiny.relative_error(out, expected) < 2e-6
    assert str(hf_experts.specify(module).gate) == "relu2(gated=False)"


def test_an_unknown_gate_function_is_refused_with_class_and_alternative() -> None:
    module = block("mixtral")
    module.act_fn = torch.nn.Softsign()
    with torch.no_grad(), pytest.raises(UnsupportedExperts, match=r"MixtralExperts: its gate function.*'grouped_mm'"):
        module(*inputs(module))


def test_a_refusal_under_torch_compile_is_the_same_error() -> None:
    model = tiny.build("mixtral", "moe_rocm")
    for module in hf.live_experts(model).values():
        module.act_fn = torch.nn.Softsign()
    with pytest.raises(UnsupportedExperts, match="MixtralExperts: its gate function"):
        logits(torch.compile(model, backend="eager"), tiny.tokens(7))


def test_an_activation_with_a_parameter_is_refused() -> None:
    module = block("mixtral")
    module.act_fn = torch.nn.PReLU()
    with torch.no_grad(), pytest.raises(UnsupportedExperts, match="its gate function could not be proven"):
        module(*inputs(module))


def test_a_norm_before_the_routing_weights_is_refused() -> None:
    module = block("mixtral")
    module.has_post_expert_norm = True
    with torch.no_grad(), pytest.raises(UnsupportedExperts, match="a norm between the down projection"):
        module(*inputs(module))


def test_weights_without_data_are_refused() -> None:
    module = block("mixtral")
    arguments = inputs(module)
    with torch.no_grad(), pytest.raises(UnsupportedExperts, match="on the meta device"):
        module.to("meta")(*arguments)


def test_an_explicit_backend_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setenv("MOE_COMPILE_MOE_BACKEND", "triton")
    module = block("mixtral")
    with torch.no_grad(), pytest.raises(BackendRefused, match="needs a CUDA or ROCm GPU"):
        module(*inputs(module))


def test_the_option_activations_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block("mixtral")
    arguments = inputs(module)
    with torch.no_grad():
        plain = module(*arguments)
        monkeypatch.setenv("MOE_COMPILE_ACTIVATIONS", "mxfp8")
        rounded = copy.deepcopy(module)
        del rounded.__dict__["_moe_compile_plan"]
        assert tiny.relative_error(rounded(*arguments), plain) > 1e-3


def test_a_model_that_ignores_the_name_is_noticed() -> None:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8, intermediate_size=32
    )
    config._experts_implementation = "moe_rocm"
    model = JetMoeForCausalLM(config).eval()
    assert hf.live_experts(model) == {}
    sentence = hf.ignored_name(model)
    assert sentence is not None
    assert "JetMoeForCausalLM" in sentence
    assert "0 modules run it" in sentence
    assert hf.ignored_name(tiny.build("mixtral", "moe_rocm")) is None
    report = moe_compile.explain(model, tiny.tokens(3), use_cache=False)
    assert sentence in report.notes


def test_a_plan_holds_no_tensor_and_survives_deepcopy() -> None:
    module = block("qwen3_moe")
    arguments = inputs(module)
    with torch.no_grad():
        out = module(*arguments)
        twin = copy.deepcopy(module)
        assert twin._moe_compile_plan == module._moe_compile_plan
        assert torch.equal(twin(*arguments), out)
    assert set(module.state_dict()) == {"gate_up_proj", "down_proj"}


def test_bfloat16_keeps_routing_weights_in_float32() -> None:
    module = block("mixtral", torch.bfloat16)
    hidden, ids, weights = inputs(module)
    with torch.no_grad():
        out = module(hidden.bfloat16(), ids, weights)
        from moe_compile.kernels.layouts import pack_experts

        spec = hf_experts.specify(module)
        packed = pack_experts(spec, module.gate_up_proj, module.down_proj)
        assert torch.equal(out, reference_experts(hidden.bfloat16(), ids, weights, packed, spec.gate))
