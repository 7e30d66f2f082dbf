"""Errors that a caller can cause. Every message names what is wrong, the value, and the choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeCompileError(Exception):
    """Base class of this package's errors."""


class OptionError(MoeCompileError, ValueError):
    """An unknown option, or a value that the option does not take."""


class BackendRefused(MoeCompileError, ValueError):
    """An explicitly chosen ``moe_backend`` cannot run a block here; the message holds every reason."""


class RewriteRefused(MoeCompileError, ValueError):
    """``strict=True`` and a block that looks like MoE was not rewritten; the message holds every reason."""


class ExpertInputError(MoeCompileError, ValueError):
    """An expert operator was called with tensors that do not fit together."""


class FactoryError(MoeCompileError, ValueError):
    """``moe-compile`` was given a factory that does not exist or that returns something else than a model."""


class ModelFailed(MoeCompileError, RuntimeError):
    """The user's own code raised: a factory when imported or called, or its model; ``__cause__`` is what it raised."""


class MissingPackage(MoeCompileError, ImportError):
    """A command needs an optional package; the message says how to install it."""


class BenchError(MoeCompileError, ValueError):
    """A benchmark that cannot run: no GPU, or an unknown shape or contender."""


class UnsupportedExperts(MoeCompileError, ValueError):
    """A Hugging Face model or experts module that ``experts_implementation="moe_rocm"`` cannot run."""


class CheckpointError(MoeCompileError, ValueError):
    """A checkpoint directory that ``moe-compile quantize`` cannot read, write or continue."""


class PackedWeightsError(MoeCompileError, RuntimeError):
    """Packed weights are needed at a moment when they cannot be made (inside a graph capture)."""


class GraphCaptureError(MoeCompileError, RuntimeError):
    """Kernels would have to be compiled or loaded inside a graph capture; the message says what to run before it."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """``" Did you mean 'x'?"``, with the choice closest in spelling, or an empty string if none is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
