"""``moe-compile verify``: the original model against the rewritten one, block by block and at the logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_compile.block_errors import THRESHOLD, BlockError, collecting, signal_to_noise
from moe_compile.errors import ModelFailed
from moe_compile.explanation import compile_and_run
from moe_compile.options import CompileOptions
from moe_compile.report import CompileReport
from moe_compile.torch_internals import as_not_compiled


@dataclass(frozen=True)
class OutputError:
    """The model's output, compiled against original. ``name`` is ``logits`` where the output has those.

    ``kl_divergence``: mean over tokens of KL(original || compiled) in nats; ``top1_agreement``: the share of tokens
    with the same largest entry. Unlike a block's error these hold what all blocks before have added up to.
    """

    name: str
    relative_error: float
    kl_divergence: float
    top1_agreement: float
    original_is_finite: bool = True

    @property
    def snr(self) -> float:
        return signal_to_noise(self.relative_error)

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "snr": self.snr}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class Verification:
    """``blocks`` are in the order of execution; each is compared on the inputs that it has in the rewritten model."""

    report: CompileReport
    blocks: tuple[BlockError, ...]
    output: OutputError
    threshold: float

    @property
    def failed(self) -> tuple[BlockError, ...]:
        return tuple(block for block in self.blocks if block.exceeds(self.threshold))

    @property
    def passed(self) -> bool:
        """Blocks were compared, none exceeds the threshold, and the output is finite where the original's is."""
        return bool(self.blocks) and not self.failed and math.isfinite(self.output.relative_error)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "passed": self.passed,
            "threshold": self.threshold,
            "blocks": [block.to_dict() for block in self.blocks],
            "output": self.output.to_dict(),
            "report": self.report.to_dict(),
        }


def verify(
    options: CompileOptions,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    threshold: float = THRESHOLD,
) -> Verification:
    """Run the model as it is and rewritten, on the same inputs and with the same random seed.

    Raises:
        OptionError, BackendRefused, RewriteRefused: as compiling it would.
        ModelFailed: the model returns no float tensor to compare.
    """
    expected = original_output(model, args, kwargs)
    with collecting() as blocks:
        report, actual = rewritten_output(replace(options, verify=True), model, args, kwargs)
    return Verification(report, tuple(blocks), output_error(*expected, actual[1]), threshold)


@dataclass(frozen=True)
class BisectStep:
    """The model with its first ``rewrites`` blocks rewritten, and none of the others."""

    rewrites: int
    output: OutputError
    wrong: bool


def bisect(
    options: CompileOptions,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    threshold: float = THRESHOLD,
    step: Callable[[BisectStep], None] = lambda step: None,
) -> str | None:
    """The name of the first block whose rewrite takes the model's output beyond ``threshold``; None if none does.

    Compiles the model about log2(blocks) times with ``max_rewrites``, so it also finds what goes wrong only when the
    original block is gone. Errors of MXFP8 add up over many layers: raise the threshold above the output's error in a
    model that is known to be right.
    """
    expected = original_output(model, args, kwargs)
    itself = output_error(*expected, original_output(model, args, kwargs)[1])
    if not itself.original_is_finite:
        raise ModelFailed("the original model's own output is not finite, so there is nothing to bisect")
    if itself.relative_error > threshold / 10:
        raise ModelFailed(
            f"the original model differs from itself on a second run (error {itself.relative_error:.1e}): it keeps "
            "state between calls or is random, so its outputs cannot be bisected; have FACTORY return one that does not"
        )

    def attempt(rewrites: int) -> tuple[CompileReport, bool]:
        report, actual = rewritten_output(replace(options, max_rewrites=rewrites), model, args, kwargs)
        error = output_error(*expected, actual[1])
        wrong = not error.relative_error <= threshold
        step(BisectStep(rewrites, error, wrong))
        return report, wrong

    report, _ = rewritten_output(options, model, args, kwargs)
    right, wrong = 0, report.rewritten
    if not wrong or not attempt(wrong)[1]:
        return None
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if attempt(middle)[1]:
            wrong = middle
        else:
            right = middle
    names = [layer.name for layer in report.layers if layer.rewritten]
    return names[wrong - 1]


def original_output(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, torch.Tensor]:
    """What the model gives as it is. Its arguments are copied: a cache among them would be filled."""
    original = getattr(model, "_orig_mod", model)
    args, kwargs = copy.deepcopy((tuple(args), dict(kwargs)))
    torch.manual_seed(0)
    with as_not_compiled(original), torch.no_grad():
        return _comparable(original(*args, **kwargs))


def rewritten_output(
    options: CompileOptions, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CompileReport, tuple[str, torch.Tensor]]:
    """What it gives under the options."""
    args, kwargs = copy.deepcopy((tuple(args), dict(kwargs)))
    torch.manual_seed(0)
    report, result = compile_and_run(options, model, args, kwargs)
    return report, _comparable(result)


def output_error(name: str, expected: torch.Tensor, actual: torch.Tensor) -> OutputError:
    """Compare along the last dimension."""
    expected, actual = (value.reshape(-1, value.shape[-1]).double() for value in (expected, actual))
    norm, error = float(expected.norm()), float((actual - expected).norm())
    finite = bool(expected.isfinite().all())
    comparable = finite and bool(actual.isfinite().all())
    log_p, log_q = expected.log_softmax(dim=-1), actual.log_softmax(dim=-1)
    divergence = float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean())
    agreement = float((expected.argmax(dim=-1) == actual.argmax(dim=-1)).double().mean())
    return OutputError(
        name=name,
        relative_error=error / norm if norm else (0.0 if error == 0 else math.inf),
        kl_divergence=max(0.0, divergence) if comparable else math.nan,
        top1_agreement=agreement if comparable else math.nan,
        original_is_finite=finite,
    )


def _comparable(result: Any) -> tuple[str, torch.Tensor]:
    logits = getattr(result, "logits", None)
    if isinstance(logits, torch.Tensor):
        return "logits", logits
    for tensor in _tensors(result):
        if tensor.dtype.is_floating_point and tensor.dim() and tensor.numel():
            return "output", tensor
    raise ModelFailed(f"the model returns no float tensor to compare, but {type(result).__name__}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def text(result: Verification) -> list[str]:
    """For people, within 80 columns: two lines for each block."""
    lines = [f"moe_rocm: {result.report.summary()}; threshold {result.threshold:g}"]
    for block in result.blocks:
        mark = "WRONG " if block.exceeds(result.threshold) else "ok    "
        lines.append(f"{mark}{block.name}")
        lines.append(
            f"      error {block.relative_error:.1e}, {block.snr:.1f} dB; worst token {block.worst_token}: "
            f"{block.worst_token_error:.1e}; worst expert {block.worst_expert}: {block.worst_expert_error:.1e}"
        )
    left = [layer for layer in result.report.layers if not layer.rewritten]
    lines += [f"-     {layer.name}: left alone: {layer.reason}" for layer in left]
    out = result.output
    lines.append(
        f"{out.name}: error {out.relative_error:.1e} ({out.snr:.1f} dB), KL {out.kl_divergence:.1e}, "
        f"top-1 agreement {out.top1_agreement:.1%}"
    )
    if not out.original_is_finite:
        lines.append("the original model's own output is not finite: blocks behind its first NaN or Inf say nothing")
    if result.failed:
        lines.append(f"first wrong block: {result.failed[0].name}")
    elif not result.blocks:
        lines.append("no block was rewritten, so there is nothing to verify")
    return lines


def describe_step(step: BisectStep) -> str:
    """One line of progress."""
    verdict = "wrong" if step.wrong else "right"
    return f"first {step.rewrites} blocks rewritten: output error {step.output.relative_error:.1e}, {verdict}"
