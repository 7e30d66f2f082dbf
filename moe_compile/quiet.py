"""Keep torch's own chatter out of the command line's output, unless somebody asked for it."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

# transformers' grouped_mm forward calls an lru_cache'd version check; caches are off on purpose in explain and demo.
_EXPECTED_WARNINGS = (".*functools.lru_cache.*", ".*force disabled by.*force_disable_caches")
# Where Dynamo's own advice starts in its error texts.
_ADVICE = ("\n  Hint: ", "\n  Developer debug context: ", "\nfrom user code:", "\nSet TORCHDYNAMO_VERBOSE")


@contextlib.contextmanager
def without_torch_noise(quiet: bool = True) -> Iterator[None]:
    """Hide two warnings that are no news, and the tracebacks that torch logs before it raises the same error.

    Does nothing if ``quiet`` is False or ``TORCH_LOGS`` is set.
    """
    if not quiet or os.environ.get("TORCH_LOGS"):
        yield
        return
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.setLevel(level)


def one_line(error: BaseException) -> str:
    """``ValueError: text``, however many lines the error's text has, and without Dynamo's advice behind it."""
    text = str(error)
    for start in _ADVICE:
        text = text.partition(start)[0]
    text = " ".join(text.split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
