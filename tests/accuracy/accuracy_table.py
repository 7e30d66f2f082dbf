"""Accuracy of the trained model as it is and rewritten, as Markdown: `python tests/accuracy/accuracy_table.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import arithmetic
import torch
from arithmetic import Scores
from train_arithmetic import load_model

MODEL = Path(__file__).parent / "model"
ACTIVATIONS = {"a16w8": "bf16", "a8w8": "mxfp8"}


def rewritten(model: Any, moe_backend: str, variant: str) -> Any:
    """The model with every expert block on ``moe_backend``; ``variant`` is ``a16w8`` or ``a8w8``."""
    torch.compiler.reset()
    options = {
        "moe_backend": moe_backend,
        "activations": ACTIVATIONS[variant],
        "strict": True,
        "inductor": False,
    }
    return torch.compile(model, backend="moe_rocm", options=options)


def mcnemar(first: torch.Tensor, second: torch.Tensor) -> float:
    """Two-sided p-value of the exact McNemar test: are two models equally often right on the same problems?

    Args: whether each is right, bool [N]. Only the problems on which one is right and the other wrong count; if the
    models are equally good, which of the two it is has the odds of a coin.
    """
    gained, lost = int((second & ~first).sum()), int((first & ~second).sum())
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def perplexity_change(original: Scores, other: Scores) -> float:
    """How much larger the perplexity of the right answers is, relative to the original's."""
    return other.perplexity / original.perplexity - 1


def _row(name: str, scores: Scores, original: Scores) -> str:
    if scores is original:
        return f"| {name} | {100 * scores.accuracy:.1f} % | {scores.perplexity:.5f} | | |"
    p, change = mcnemar(original.correct, scores.correct), perplexity_change(original, scores)
    return f"| {name} | {100 * scores.accuracy:.1f} % | {scores.perplexity:.5f} | {100 * change:+.3f} % | {p:.2f} |"


def table(device: str, moe_backends: list[str]) -> str:
    """Markdown, one line a variant, of the model in ``MODEL`` on 1000 held-out problems."""
    model = load_model(MODEL).to(device).eval()
    exam = arithmetic.exam_problems()
    original = arithmetic.evaluate(model, exam, device)
    lines = [
        "| experts | right answers | perplexity | change | McNemar p |",
        "|---|---|---|---|---|",
        _row(f"bf16, transformers, {device}", original, original),
    ]
    for moe_backend in moe_backends:
        for variant in ACTIVATIONS:
            scores = arithmetic.evaluate(rewritten(model, moe_backend, variant), exam, device)
            lines.append(_row(f"`{moe_backend}`, {variant}", scores, original))
    return "\n".join(lines)


if __name__ == "__main__":
    if torch.cuda.is_available():
        print(table("cuda", ["reference", "triton"]))
    else:
        print(table("cpu", ["reference"]))
