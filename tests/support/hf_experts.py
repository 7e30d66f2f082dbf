"""Every experts class of the installed transformers, built tiny from its model's own default configuration."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import pkgutil
import re
from dataclasses import dataclass
from typing import Any

import torch

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 64, 32
MARK = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)", re.M)

_SIZES = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_moe_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "top_k": TOP_K,
    "moe_k": TOP_K,
    "num_experts_per_token": TOP_K,
    "hidden_size": HIDDEN,
    "hidden_dim": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "intermediate_size": INTERMEDIATE,
}


class TinyConfig:
    """A configuration read through: sizes are tiny, everything else is what the model's default says."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._config = config
        self._experts_implementation = implementation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # asked for by copy and pickle before there is a _config
            raise AttributeError(name)
        if name in _SIZES:
            return _SIZES[name]
        if name.endswith(("intermediate_size", "ffn_hidden_size", "expert_dim", "moe_intermediate_dim")):
            return INTERMEDIATE
        return getattr(self._config, name)


@dataclass(frozen=True)
class ExpertsClass:
    """One decorated class."""

    model: str
    cls: type[torch.nn.Module]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.cls.__name__}"

    def build(self, implementation: str, dtype: torch.dtype) -> torch.nn.Module:
        """The module with seeded random weights, in evaluation mode."""
        config = TinyConfig(_default_config(self.cls), implementation)
        wanted = {
            "intermediate_size": INTERMEDIATE,
            "moe_intermediate_size": INTERMEDIATE,
            "layer_idx": 0,
            "num_experts": EXPERTS,
        }
        parameters = list(inspect.signature(inspect.unwrap(self.cls.__init__)).parameters)[2:]
        module = self.cls(config, **{name: wanted[name] for name in parameters if name in wanted})
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.3)
        return module.to(dtype).eval()


def _default_config(cls: type[torch.nn.Module]) -> Any:
    """The configuration class that the experts' ``__init__`` names, or the model's text configuration."""
    module = importlib.import_module(cls.__module__)
    annotation = inspect.signature(inspect.unwrap(cls.__init__)).parameters["config"].annotation
    if isinstance(annotation, str):
        annotation = getattr(module, annotation, None)
    if annotation is None or annotation is inspect.Parameter.empty:
        configs = [
            c
            for n, c in vars(module).items()
            if n.endswith("Config") and c.__module__.startswith("transformers.models")
        ]
        text = [c for c in configs if "Text" in c.__name__ or "Thinker" in c.__name__]
        annotation = (text or configs)[0]
    return annotation().get_text_config()


@functools.cache
def every_experts_class() -> tuple[ExpertsClass, ...]:
    """All classes decorated with ``use_experts_implementation``, sorted by model."""
    import transformers.models

    found = []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{package.name}.modeling_{package.name}"
        spec = importlib.util.find_spec(name) if package.ispkg else None
        if spec is None or spec.origin is None:
            continue
        with open(spec.origin) as file:
            source = file.read()
        names = MARK.findall(source)
        if names:
            module = importlib.import_module(name)
            found += [ExpertsClass(package.name, getattr(module, class_name)) for class_name in names]
    return tuple(found)
