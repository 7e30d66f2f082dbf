"""Tiny causal language models of transformers, one a family of experts, random weights, and their yardstick."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moe_compile.kernels.mxfp8 import dequantize, quantize

VOCAB = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPED_ROUTER: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# (model class, sizes beside _SIZES; None takes one of those away)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("MiniMaxForCausalLM", {"num_local_experts": 8, "intermediate_size": 96, "block_size": 16}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"num_local_experts": 8, "intermediate_size": 96}),
    "minimax_m3_vl": (
        "MiniMaxM3VLForCausalLM",
        {
            "num_local_experts": 8,
            "intermediate_size": 96,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 64,
            "rotary_dim": 8,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "intermediate_size": 96}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "intermediate_size": 48, "head_dim": None}),
    "glm4_moe": ("Glm4MoeForCausalLM", _GROUPED_ROUTER),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_GROUPED_ROUTER, **_MLA, "num_key_value_heads": 4, "head_dim": None}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {"n_routed_experts": 8, "moe_intermediate_size": 48}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "intermediate_size": 96,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
}


def model_class(family: str) -> Any:
    import transformers

    name = FAMILIES[family][0]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    return getattr(modeling_minimax_m3_vl, name)


def config(family: str, **sizes: Any) -> Any:
    values = {**_SIZES, **FAMILIES[family][1], **sizes}
    return model_class(family).config_class(**{name: value for name, value in values.items() if value is not None})


def build(family: str, implementation: str = "grouped_mm", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model in evaluation mode with 1 or 2 MoE layers."""
    torch.manual_seed(0)
    kind = model_class(family)
    model = kind._from_config(config(family, **sizes), dtype=dtype, experts_implementation=implementation).eval()
    randomise(model)
    return model


def randomise(model: Any) -> None:
    """Weights with which experts matter in the logits, and no two tokens are close to a tie."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
                if ".experts." in name:
                    parameter.mul_(2)


def yardstick(model: Any) -> Any:
    """The same model with every expert weight rounded to MXFP8 along the contracted dimension, and back."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for module in rounded.modules():
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                weight = module._parameters.get(name)
                if weight is not None and weight.dim() == 3:
                    rows = weight.transpose(1, 2) if module.is_transposed else weight
                    rows.copy_(dequantize(*quantize(rows), dtype=weight.dtype))
    return rounded


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||``, in float64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def linear_names(model: Any) -> list[str]:
    """Every nn.Linear, by name: what an expert-only FP8 checkpoint does not quantise."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def fp8_config(model: Any, **changes: Any) -> Any:
    from transformers import FineGrainedFP8Config

    values = {"weight_block_size": (1, 32), "scale_fmt": "ue8m0", "quant_method": "mxfp8", **changes}
    return FineGrainedFP8Config(modules_to_not_convert=linear_names(model), **values)


def with_fp8_experts(
    family: str, implementation: str = "moe_rocm", scale_dtype: torch.dtype = torch.float8_e8m0fnu, **changes: Any
) -> Any:
    """The model with transformers' ``FP8Experts`` in place of its experts, their MXFP8 weights quantised by us.

    ``changes`` are of the quantisation config; only with the MXFP8 one are there weights.
    """
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model, original = build(family, implementation), build(family, implementation)
    config = fp8_config(model, **changes)
    replace_with_fp8_linear(model, config.modules_to_not_convert, config, pre_quantized=True)
    originals = dict(original.named_modules())
    for path, module in model.named_modules():
        if type(module).__name__ != "FP8Experts":
            continue
        for name in ("gate_up_proj", "down_proj"):
            values, scales = quantize(getattr(originals[path], name).detach())
            if changes:
                scales = torch.ones(getattr(module, f"{name}_scale_inv").shape)
            else:
                scales = scales.view(scale_dtype)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
            setattr(module, f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
    return model


def minimax_m3_vlm(implementation: str = "grouped_mm") -> Any:
    """The whole vision-language MiniMax-M3: one dense and one MoE layer behind one vision layer. Image token: 150."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    both = MiniMaxM3VLConfig(
        text_config=config("minimax_m3_vl").to_dict(),
        vision_config={**vision, "image_size": 56, "patch_size": 14},
        projector_hidden_size=64,
        image_token_index=150,
        video_token_index=151,
    )
    torch.manual_seed(0)
    kind = MiniMaxM3SparseForConditionalGeneration
    model = kind._from_config(both, dtype=torch.float32, experts_implementation=implementation).eval()
    randomise(model)
    return model
