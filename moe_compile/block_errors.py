"""``verify=True``: an operator that compares each rewritten block with its original, on the model's own inputs.

``moe_compile::compare_blocks(original, rewritten, topk_ids, index)`` returns a copy of ``rewritten``, so a model gives
what it would give without it. The original block stays in the graph beside the rewritten one and costs its time in
every run; errors are taken in the first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_compile.torch_internals import OpOverload

logger = logging.getLogger("moe_compile.verify")

# Measured: MXFP8 weights move a block by 2 to 4 %, activations in MXFP8 too by 4 to 6 %; gate and up swapped by 100 %.
THRESHOLD = 0.1


@dataclass(frozen=True)
class BlockError:
    """How far a rewritten block is from the original on the same inputs.

    ``relative_error`` is ``||rewritten - original|| / ||original||``, ``snr`` the same in dB. ``worst_token`` is the
    row with the largest relative error. ``worst_expert`` is the expert whose tokens, taken together, have the largest
    (-1 if no token has an expert); every token counts for each of its experts.
    """

    name: str
    tokens: int
    relative_error: float
    worst_token: int
    worst_token_error: float
    worst_expert: int
    worst_expert_error: float

    @property
    def snr(self) -> float:
        return signal_to_noise(self.relative_error)

    def exceeds(self, threshold: float) -> bool:
        """NaN counts as an error of any size."""
        return not self.relative_error <= threshold

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: NaN and infinity are None."""
        values = {**asdict(self), "snr": self.snr}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def signal_to_noise(relative_error: float) -> float:
    """dB; infinite without any error."""
    return math.inf if relative_error == 0 else -20 * math.log10(relative_error)


def measure(name: str, original: torch.Tensor, rewritten: torch.Tensor, topk_ids: torch.Tensor) -> BlockError | None:
    """Compare two outputs of one block; None without tokens.

    Args:
        original, rewritten: (T, H) or with more leading dimensions, any float dtype.
        topk_ids: (T, K) or the same elements in another shape; ids outside of the experts count for none.
    """
    original, rewritten = (value.reshape(-1, value.shape[-1]).double() for value in (original, rewritten))
    tokens = original.shape[0]
    if tokens == 0:
        return None
    signal = original.square().sum(dim=-1)  # (T,)
    noise = (rewritten - original).square().sum(dim=-1)
    by_token = _ratio(noise, signal)
    ids = topk_ids.reshape(tokens, -1).long().clamp(min=-1) + 1  # 0 holds what has no expert
    totals = torch.zeros(2, int(ids.max()) + 1, dtype=torch.float64, device=ids.device)
    for row, values in enumerate((noise, signal)):
        totals[row].index_add_(0, ids.flatten(), values.unsqueeze(1).expand_as(ids).flatten())
    by_expert = _ratio(totals[0], totals[1])
    by_expert[0] = 0
    worst_token, worst_expert = int(by_token.argmax()), int(by_expert.argmax())
    return BlockError(
        name=name,
        tokens=tokens,
        relative_error=float(_ratio(noise.sum(), signal.sum())),
        worst_token=worst_token,
        worst_token_error=float(by_token[worst_token]),
        worst_expert=worst_expert - 1,
        worst_expert_error=float(by_expert[worst_expert]),
    )


def _ratio(noise: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
    """Relative L2 error from two sums of squares; 0 where both are 0."""
    return torch.where(noise == 0, 0.0, (noise / signal).sqrt())


_names: list[str] = []
_pending: set[int] = set()
_collectors: list[list[BlockError]] = []
_lock = threading.Lock()


def new_block(name: str) -> int:
    """The operator's ``index`` for a block."""
    with _lock:
        _names.append(name)
        _pending.add(len(_names) - 1)
        return len(_names) - 1


@contextlib.contextmanager
def collecting() -> Iterator[list[BlockError]]:
    """The errors taken while the block runs, in the order of execution."""
    found: list[BlockError] = []
    with _lock:
        _collectors.append(found)
    try:
        yield found
    finally:
        with _lock:
            _collectors[:] = [collector for collector in _collectors if collector is not found]


def _compare(original: torch.Tensor, rewritten: torch.Tensor, topk_ids: torch.Tensor, index: int) -> torch.Tensor:
    capturing = rewritten.is_cuda and torch.cuda.is_current_stream_capturing()
    with _lock:
        first = index in _pending and not capturing
        if first:
            _pending.discard(index)
    if first:
        error = measure(_names[index], original, rewritten, topk_ids)
        if error is not None:
            _record(error)
    return rewritten.clone()


def _record(error: BlockError) -> None:
    with _lock:
        for collector in _collectors:
            collector.append(error)
    log = logger.warning if error.exceeds(THRESHOLD) else logger.info
    log(
        "moe_rocm: verify %s: relative error %.1e (%.1f dB), worst token %d (%.1e), worst expert %d (%.1e)",
        error.name,
        error.relative_error,
        error.snr,
        error.worst_token,
        error.worst_token_error,
        error.worst_expert,
        error.worst_expert_error,
    )


def _fake(original: torch.Tensor, rewritten: torch.Tensor, topk_ids: torch.Tensor, index: int) -> torch.Tensor:
    return rewritten.clone()


_library = torch.library.Library("moe_compile", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "compare_blocks(Tensor original, Tensor rewritten, Tensor topk_ids, int index) -> Tensor",
    # It reads values on the host, which a CUDA graph cannot record.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
_library.impl("compare_blocks", _compare, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("moe_compile::compare_blocks", _fake, lib=_library)


def operator() -> OpOverload:
    """``torch.ops.moe_compile.compare_blocks.default``."""
    overload: OpOverload = torch.ops.moe_compile.compare_blocks.default
    return overload
