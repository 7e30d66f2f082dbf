"""What AITER's MXFP8 kernels can run, as sentences. Nothing here needs AITER or a GPU.

AITER guards almost none of this itself: a wrong size reads memory that is not there, and a wrong gate function is
computed without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from moe_compile.spec import ExpertSpec, GateFunction

Reason = tuple[str, str | None]  # what is in the way, and what helps, if anything does
Kind = Literal["Swiglu", "Silu"]

OAI_ALPHA = 1.702  # a constant of AITER's Swiglu kernels, as is the 1 that is added to up
BUILT_IN_LIMIT = 7.0  # of Swiglu, where a release cannot be told another, and where it is told None or 0
MAX_TOP_K = 254  # AITER takes 255, and one slot is ours
MAX_TOKENS = 2**24 - 1  # a sorted slot is `k << 24 | token`
_MAX_DESCRIPTOR = (
    2**32
)  # bytes behind one buffer descriptor, with which stage 2 addresses the down weights of all experts

# AITER's heuristic stage-1 kernels that were seen to wait too weakly for their copies, by hidden size.
_HAZARD_HIDDEN_SIZES = (6144,)
SAFE_TOKENS = 16


def kind_of(gate: GateFunction) -> Kind | None:
    """AITER's name for a gate function, None if it has no such kernel. The limit is another matter."""
    if gate.activation != "silu" or not gate.gated or gate.limit_after:
        return None
    if gate.gate_softcap is not None or gate.up_softcap is not None:
        return None
    if math.isclose(gate.alpha, OAI_ALPHA, rel_tol=1e-6) and gate.up_offset == 1.0:
        return "Swiglu"
    if gate.alpha == 1.0 and gate.up_offset == 0.0:
        return "Silu"
    return None


def swiglu_limit(gate: GateFunction) -> float:
    """The argument of that name. AITER reads None and 0 as 7 for Swiglu, and as no limit for Silu."""
    if gate.limit is not None:
        return gate.limit
    return math.inf if kind_of(gate) == "Swiglu" else 0.0


def block_reasons(spec: ExpertSpec, runtime_limit: bool) -> Iterator[Reason]:
    """Every reason why AITER cannot run a block.

    Args:
        runtime_limit: this AITER passes the limit to its kernels (see `moe_compile.aiter_package`).
    """
    if spec.hidden_size % 256:
        yield f"hidden size must be a multiple of 256, got {spec.hidden_size}", None
    if spec.intermediate_size % 128 or spec.intermediate_size == 0:
        yield (
            f"intermediate size must be a multiple of 128, got {spec.intermediate_size}: AITER does not check it and "
            "reads beyond the weights",
            None,
        )
    if not 1 <= spec.top_k <= MAX_TOP_K:
        yield f"top-k must be 1 to {MAX_TOP_K}, got {spec.top_k}", None
    if spec.num_experts * spec.hidden_size * spec.intermediate_size >= _MAX_DESCRIPTOR:
        yield (
            f"the down weights of all experts must be below 4 GiB, got {spec.sizes}",
            "spread the experts over more GPUs",
        )
    yield from gate_reasons(spec.gate, runtime_limit)
    if spec.has_bias:
        yield "biases: AITER's tuned MXFP8 kernels drop them silently", None
    for what, dtype in (("hidden states", spec.activation_dtype), ("results", spec.out_dtype)):
        if dtype not in (torch.bfloat16, torch.float16):
            yield f"{what} must be bf16 or fp16, got {str(dtype).removeprefix('torch.')}", None


def gate_reasons(gate: GateFunction, runtime_limit: bool) -> Iterator[Reason]:
    """Those that concern the gate function."""
    kind = kind_of(gate)
    if kind is None:
        yield f"AITER has silu and silu(alpha={OAI_ALPHA}, up_offset=1), each with a limit before; this is {gate}", None
        return
    built_in = BUILT_IN_LIMIT if kind == "Swiglu" else None
    if not runtime_limit and gate.limit != built_in:
        yield (
            f"this AITER has the limit {'7' if built_in else 'None'} of {kind} built in, this block has {gate.limit}",
            "build a newer ROCm/aiter (one with aiter.ops.flydsl.moe_kernels.runtime_swiglu_limit)",
        )


def activations_reason(activations: str) -> Reason | None:
    """AITER quantises the activations of both GEMMs, whatever it is asked."""
    if activations == "bf16":
        return "AITER's kernels round activations to MXFP8, and activations='bf16' forbids it", "activations='auto'"
    return None


def hazard(spec: ExpertSpec | None) -> Reason | None:
    """The load-wait hazard of stage 1, if a kernel that is known to have it would run; with no block, in general."""
    if spec is not None and spec.hidden_size not in _HAZARD_HIDDEN_SIZES:
        return None
    which = "blocks of hidden size 6144 (MiniMax-M3) run" if spec is None else f"this block ({spec.sizes}) runs"
    return (
        f"{which} stage-1 kernels of AITER that wait too weakly for their loads: with more than {SAFE_TOKENS} "
        "tokens for one expert, rows may be computed from data that has not arrived. Seen in an emulator, not on "
        "hardware; batches of up to 16 tokens are safe",
        "moe_backend='flydsl' or 'triton'; AITER's pull request 5561 appears to fix it, which cannot be told from here",
    )


def untuned(spec: ExpertSpec | None, tuned: Sequence[str]) -> Reason | None:
    """AITER falls back to heuristics, with kernels that nobody measured or ran for this block.

    Args:
        tuned: the shapes for which this AITER has configurations, written as `ExpertSpec.sizes`.
    """
    if spec is None or spec.sizes in tuned:
        return None
    shapes = ", ".join(tuned) or "nothing"
    return (
        f"no tuned configuration for {spec.sizes}, so heuristics choose its kernels (tuned for: {shapes})",
        "compare with moe_backend='flydsl' or 'triton'",
    )
