"""Tiny transformers models with random weights, and their quantise-dequantise yardstick."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moe_compile.demo import with_mxfp8_experts

VOCAB = 160
LAYERS = 2


def minimax_m2(implementation: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """MiniMaxM2ForCausalLM with two MoE layers."""
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **sizes,
        }
    )
    return _seeded(MiniMaxM2ForCausalLM, config, implementation, dtype)


def minimax_m3(implementation: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """MiniMaxM3VLForCausalLM with one dense and two MoE layers."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    config = MiniMaxM3VLTextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 64,
            "num_hidden_layers": LAYERS + 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **sizes,
        }
    )
    return _seeded(MiniMaxM3VLForCausalLM, config, implementation, dtype)


MODELS = {"minimax_m2": minimax_m2, "minimax_m3": minimax_m3}


def _seeded(kind: Any, config: Any, implementation: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=dtype, experts_implementation=implementation).eval()
    _give_experts_weight(model)
    return model


def _give_experts_weight(model: Any) -> None:
    """Let experts matter in the logits, and let each token choose its experts with a wide margin.

    At random weights, rounding anywhere before a router sends some tokens to other experts, and no tolerance tells that
    from a fault. So every token carries a code in its first E dimensions, K of them positive, which the routers read.
    """
    generator = torch.Generator().manual_seed(1)
    config = model.config
    num_experts, top_k = config.num_local_experts, config.num_experts_per_tok
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        order = torch.rand(embedding.shape[0], num_experts, generator=generator).argsort(dim=-1)
        embedding.normal_(generator=generator)
        embedding[:, :num_experts] = torch.where(order < top_k, 4.0, -4.0).to(embedding.dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter[:, :num_experts] += 0.5 * torch.eye(num_experts)
            elif ".experts." in name:
                parameter.mul_(6)


def tokens(length: int, batch: int = 1, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(device)


def yardstick(model: Any) -> Any:
    """The same model with every expert weight rounded to MXFP8 and back: what the rewritten model must equal."""
    return with_mxfp8_experts(copy.deepcopy(model))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||``, in float64; NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())
