"""A Hugging Face config folder (or the name of a model in the local cache) as FACTORY. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from moe_compile.errors import FactoryError, MissingPackage, ModelFailed
from moe_compile.quiet import one_line

TOKENS = 16
# Layers that are built with random weights: the dense ones that come first, and so many MoE layers.
MOE_LAYERS = 2
# Configuration values that hold one entry for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers", "attn_type_list")


def is_hf_name(factory: str) -> bool:
    """Whether FACTORY is a folder, or looks like ``organisation/model``, and not like ``file.py:function``."""
    if Path(factory).is_dir():
        return True
    return ":" not in factory and factory.count("/") == 1 and not factory.endswith(".py") and not Path(factory).exists()


def random_model(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A causal language model of ``name``'s configuration, its layers cut to the first few, with random bf16 weights.

    Widths and experts stay as they are, so the report's sizes are the model's own. On the GPU if there is one.

    Raises:
        FactoryError: no configuration there, or transformers does not know the model.
        MissingPackage: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM

    config = cut(_config(name))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
        except Exception as error:  # a configuration may be wrong in any way
            raise ModelFailed(f"building a model of {name!r} raised {one_line(error)}") from error
    return model.eval(), _inputs(model)


def stored_model(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model with its weights, from disk.

    Raises:
        FactoryError, MissingPackage: as :func:`random_model`, or there are no weights.
    """
    from transformers import AutoModelForCausalLM

    _config(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", experts_implementation="grouped_mm", local_files_only=True
        )
    except OSError as error:
        raise FactoryError(
            f"FACTORY {name!r}: no weights found ({one_line(error)}); --random-weights builds the model without them"
        ) from None
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval(), _inputs(model)


def cut(config: Any) -> Any:
    """The same configuration with the dense layers at the start and :data:`MOE_LAYERS` MoE layers."""
    text = config.get_text_config()
    layers: int = text.num_hidden_layers
    keep = min(layers, _dense_layers(text) + MOE_LAYERS)
    for name in _PER_LAYER:
        values = getattr(text, name, None)
        if isinstance(values, list) and len(values) == layers:
            setattr(text, name, values[:keep])
    text.num_hidden_layers = keep
    return config


def _dense_layers(text: Any) -> int:
    kinds = getattr(text, "mlp_layer_types", None)
    if isinstance(kinds, list):
        return kinds.index("sparse") if "sparse" in kinds else 0
    return int(getattr(text, "first_k_dense_replace", 0) or 0)


def _config(name: str) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackage(
            f'FACTORY {name!r} needs transformers, which is not installed: pip install "moe_compile[hf]"'
        )
    from transformers import AutoConfig

    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise FactoryError(f"FACTORY {name!r}: the folder holds no config.json")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FactoryError(
            f"FACTORY {name!r} is no configuration on this disk that transformers knows: {one_line(error)} "
            "(a function is written file.py:function)"
        ) from None


def _inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, TOKENS), generator=generator)
    return {"input_ids": ids.to(model.device), "use_cache": False}
