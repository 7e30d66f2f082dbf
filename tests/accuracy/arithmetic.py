"""Integer arithmetic as text: the problems, which of them are held out of training, and how answers are scored.

A problem is ``017 times 024? 860 430 8040.``: numbers have a fixed width, and those of the answer begin with the units,
so that carries run in the order of writing. A product is written after the first factor times the units, and times the
tens, of the second. A token is one digit, word or sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

OPERATIONS = (" plus ", " minus ", " times ")
PLUS, MINUS, TIMES = range(3)
_SYMBOLS = ("", ".", *"0123456789", *OPERATIONS, "? ", " ")
PAD, END, _ZERO = 0, 1, 2
_WORD, _ASK, _SPACE = 12, 15, 16
VOCAB = 32  # more than there are symbols: a size that matrix units like
PROMPT = 8
LENGTH = PROMPT + 13
_HELD_OUT_ONE_IN = 16


def _mix(value: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits, the same on every device and in every version of torch."""
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFFFFFF
    return value


def _split(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return codes // 1_000_000, codes // 1000 % 1000, codes % 1000


def _all_problems(operation: int) -> torch.Tensor:
    limit = 100 if operation == TIMES else 1000
    number = torch.arange(limit)
    codes = (operation * 1_000_000 + number[:, None] * 1000 + number).flatten()
    _, a, b = _split(codes)
    return codes[a >= b] if operation == MINUS else codes


def _is_held_out(codes: torch.Tensor) -> torch.Tensor:
    operation, a, b = _split(codes)
    unordered = operation * 1_000_000 + torch.minimum(a, b) * 1000 + torch.maximum(a, b)  # a plus b goes with b plus a
    return _mix(unordered + 1) % _HELD_OUT_ONE_IN == 0


def training_problems(operation: int) -> torch.Tensor:
    """Codes, int64 [N], of all problems of ``PLUS``, ``MINUS`` (not below zero) or ``TIMES`` that are not held out."""
    codes = _all_problems(operation)
    return codes[~_is_held_out(codes)]


def _held_out(start: int, stops: tuple[int, int, int]) -> torch.Tensor:
    chosen = []
    for operation, stop in enumerate(stops):
        codes = _all_problems(operation)
        codes = codes[_is_held_out(codes)]
        chosen.append(codes[_mix(codes + 7).argsort(stable=True)][start:stop])
    return torch.cat(chosen)


def exam_problems() -> torch.Tensor:
    """Codes of the 1000 problems, as many of each operation, that nothing in the training looks at."""
    return _held_out(0, (333, 333, 334))


def validation_problems() -> torch.Tensor:
    """Codes of other held-out problems, by which training chooses the best weights."""
    return _held_out(334, (550, 550, 550))


def _digits(number: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Tokens of a number, units first."""
    return [number // 10**place % 10 + _ZERO for place in range(width)]


def encode(codes: torch.Tensor) -> torch.Tensor:
    """Tokens, int64 [N, LENGTH], of the problems ``codes``, answer and end included, padded on the right."""
    operation, a, b = _split(codes)

    def fill(token: int) -> torch.Tensor:
        return torch.full_like(codes, token)

    prompt = [*reversed(_digits(a, 3)), operation + _WORD, *reversed(_digits(b, 3)), fill(_ASK)]
    result = torch.where(operation == PLUS, a + b, torch.where(operation == MINUS, a - b, a * b))
    short = [*_digits(result, 4), fill(END), *[fill(PAD)] * 8]
    units, tens = _digits(a * (b % 10), 3), _digits(a * (b // 10), 3)
    long = [*units, fill(_SPACE), *tens, fill(_SPACE), *_digits(result, 4), fill(END)]
    answer = torch.where((operation == TIMES)[:, None], torch.stack(long, 1), torch.stack(short, 1))
    return torch.cat([torch.stack(prompt, 1), answer], 1)


def text(tokens: torch.Tensor) -> str:
    """What one row of tokens says."""
    return "".join(_SYMBOLS[token] if token < len(_SYMBOLS) else "#" for token in tokens.tolist())


def answer_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of the answers: logits [N, L-1 or L, VOCAB] of ``tokens`` [N, L]."""
    labels = tokens[:, PROMPT:]
    logits = logits[:, PROMPT - 1 : tokens.shape[1] - 1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@dataclass(frozen=True)
class Scores:
    """Of N problems: whether the greedy answer is right, bool [N], and the likelihood of the right answers' tokens."""

    correct: torch.Tensor
    nll: torch.Tensor  # float64 [N], summed over the tokens of the answer
    tokens: torch.Tensor  # int64 [N], how many these are

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    @property
    def perplexity(self) -> float:
        return float((self.nll.sum() / self.tokens.sum()).exp())


@torch.no_grad()
def evaluate(model: Any, codes: torch.Tensor, device: Any = None, batch: int = 1000) -> Scores:
    """Scores of a causal language model, in one forward pass a batch.

    A greedy answer is right exactly if each of its tokens is the first choice after the right tokens before it.
    """
    parts = []
    for chunk in encode(codes).to(device or model.device).split(batch):
        labels = chunk[:, PROMPT:]
        logits = model(chunk[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].double()
        counted = labels != PAD
        right = (logits.argmax(-1) == labels) | ~counted
        nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * counted
        parts.append((right.all(1).cpu(), nll.sum(1).cpu(), counted.sum(1).cpu()))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def answer_greedily(model: Any, codes: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Tokens, int64 [N, LENGTH], of the problems with the model's own answers, one token after the other."""
    tokens = encode(codes)[:, :PROMPT].to(device or model.device)
    while tokens.shape[1] < LENGTH:
        choice = model(tokens, use_cache=False).logits[:, -1].argmax(-1)
        over = ((tokens == END) | (tokens == PAD)).any(1)
        tokens = torch.cat([tokens, choice.masked_fill(over, PAD)[:, None]], 1)
    return tokens.cpu()
