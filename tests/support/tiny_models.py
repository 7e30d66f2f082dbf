"""Tiny transformers models with random weights, and their quantise-dequantise yardstick."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moe_compile.demo import relative_error, separate_routing, with_mxfp8_experts

__all__ = ["LAYERS", "MODELS", "VOCAB", "relative_error", "tokens", "yardstick"]

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
    separate_routing(model)
    return model


def tokens(length: int, batch: int = 1, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(device)


def yardstick(model: Any) -> Any:
    """The same model with every expert weight rounded to MXFP8 and back: what the rewritten model must equal."""
    return with_mxfp8_experts(copy.deepcopy(model))
