"""What to do about a block that was left alone, by the reason that the report gives."""

from __future__ import annotations

import re

# In this order; the first pattern that is found in the reason.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"max_rewrites=", "raise or drop the option max_rewrites"),
    (r"graph break inside", "remove the graph break: take the hook, print or .item() at that line out of the experts"),
    (r"gradients are enabled", "call the model under torch.no_grad() or torch.inference_mode()"),
    (r"dropout", "switch the dropout off: model.eval(), or p=0"),
    (
        r"made by placeholder|comes? from placeholder|is not a parameter or buffer",
        "a part of the block comes from outside of this graph: remove the graph break before it, or merge LoRA weights",
    ),
    (
        r"only parameters and buffers are packed",
        "give the experts their weights as parameters: merge LoRA weights, leave out quantisation and offloading",
    ),
    (
        r"used elsewhere|used outside the block|is an output of the graph",
        "do not read values from inside the experts: remove the hook or the returned intermediate result",
    ),
    (
        r"not a pointwise operator|moves rows|reads another input of the graph",
        "only pointwise operators may stand between the two projections: take this one out, or put it behind the sum",
    ),
    (
        r"gate function is none of the known ones|gate function has \d+ constants|cannot be traced",
        "use a gate function that is known (README, What is rewritten), or ask for this one in an issue",
    ),
    (r"float64|fp64|converts to", "use bf16, fp16 or fp32 throughout the block"),
    (r"without block scales", "FP8 weights need their E8M0 block scales: use a bf16 checkpoint or one in MXFP8"),
    (r"separate gate and up weights", "join gate and up to one weight of 2 * intermediate rows"),
    (
        r"dynamic",
        "keep these sizes static: torch.compile(dynamic=False), or mark_dynamic for the tokens alone",
    ),
    (
        r"count|histc|bincount|cumulative sum|overflows",
        "count the tokens of each expert as transformers does: histc of the sorted ids, then cumsum to int32",
    ),
    (r" is on \w+", "move the model to one device"),
)
_UNKNOWN = "moe-compile dump FACTORY -o DIR shows the graph around the node"


def remedy(reason: str) -> str:
    """One sentence; for a reason without a remedy of its own, how to look further."""
    return next((what for pattern, what in _REMEDIES if re.search(pattern, reason)), _UNKNOWN)
