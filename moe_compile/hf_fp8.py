"""Which of transformers' ``FP8Experts`` modules hold MXFP8 weights, and why the others are refused.

``weight_scale_inv`` is MXFP8 only with blocks of [1, 32] and E8M0 scales. The same module class holds 128x128-block
weights with float32 scales, and, where a checkpoint's configuration lacks ``scale_fmt: "ue8m0"``, E8M0 bytes that were
converted to float32 numbers (byte 119 becomes 119.0, not 2**-8). Neither may ever be read as E8M0.
"""

from __future__ import annotations

from typing import Any

import torch

DEQUANTIZE = (
    "load the checkpoint with quantization_config=FineGrainedFP8Config(dequantize=True), whose weights are then packed "
    "to MXFP8"
)
RELOAD = "load it again from a checkpoint that is complete and says what it holds"
BLOCK = (1, 32)

# What FP8Experts leaves out of these models' experts (transformers 5.17 to 5.24), by config.model_type.
_INCOMPLETE = {
    "muse_spark": "the norm between the down projection and the routing weights",
    "step3p7": "the clamp after the activation",
}


def problem(module: torch.nn.Module, up_name: str) -> tuple[str, str] | None:
    """Why the weights of an FP8 experts module cannot be used as MXFP8, and what to do; None if they can.

    Args:
        up_name: ``gate_up_proj``, or ``up_proj`` of experts without a gate.
    """
    experts: Any = module
    model_type = str(getattr(experts.config, "model_type", ""))
    for prefix, what in _INCOMPLETE.items():
        if model_type.startswith(prefix):
            return f"transformers' FP8 experts leave out {what} of {model_type}, so their result is wrong", DEQUANTIZE
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return f"activation_scheme={experts.activation_scheme!r} quantises activations with stored scales", DEQUANTIZE
    for name in (up_name, "down_proj"):
        weight = getattr(module, name)
        if weight.dtype != torch.float8_e4m3fn:
            return f"its {name} is {_name(weight.dtype)}, MXFP8 weights are float8_e4m3fn", DEQUANTIZE
        found = _scale_problem(module, name, weight)
        if found is not None:
            return found
    return None


def _scale_problem(module: torch.nn.Module, name: str, weight: torch.Tensor) -> tuple[str, str] | None:
    block = getattr(module, "block_size", None)
    scale = getattr(module, f"{name}_scale_inv", None)
    if not isinstance(scale, torch.Tensor):
        return f"{name}_scale_inv is missing, and FP8 weights mean nothing without their scales", RELOAD
    if block is None or tuple(block) != BLOCK:
        return (
            f"its {name} has {_name(scale.dtype)} scales for blocks of {_shown(block)}, not MXFP8's E8M0 scales for "
            "blocks of [1, 32]",
            DEQUANTIZE,
        )
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return (
            f"{name}_scale_inv is {_name(scale.dtype)}, not E8M0 bytes. If the checkpoint stores uint8 scales, its "
            'quantization_config lacks "scale_fmt": "ue8m0", and they were loaded as numbers',
            RELOAD,
        )
    if scale.is_meta or _was_not_loaded(weight, scale):
        return (
            f"{name}_scale_inv is missing in the checkpoint, and FP8 weights mean nothing without it",
            RELOAD,
        )
    expected = (*weight.shape[:2], -(-weight.shape[2] // BLOCK[1]))
    if tuple(scale.shape) != expected:
        return f"{name}_scale_inv has shape {tuple(scale.shape)}, expected {expected}, one byte for 32 elements", RELOAD
    return None


def _was_not_loaded(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether ``from_pretrained`` loaded the weight and left the scale uninitialised.

    transformers (5.17 to 5.24) marks what it loads. Scales that it converts from uint8 after loading lose the mark, and
    are the only ones made without ``requires_grad``.
    """
    mark = "_is_hf_initialized"
    return hasattr(weight, mark) and not hasattr(scale, mark) and scale.requires_grad


def _shown(block: Any) -> str:
    return "a whole matrix" if block is None else str(list(block))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
