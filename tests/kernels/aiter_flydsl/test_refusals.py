"""What the operator refuses before AITER gets it wrong; and that the stand-in would notice if it did not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiter_stand_in
import pytest
import torch
from aiter_blocks import Block, E, H, I, relative
from aiter_stand_in import Breach

from moe_compile import packed_weights
from moe_compile.errors import ExpertInputError
from moe_compile.kernels.mxfp8 import quantize
from moe_compile.spec import GateFunction


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    packed_weights.clear()
    yield
    packed_weights.clear()


@pytest.fixture
def aiter(tmp_path: Path) -> Iterator[None]:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        yield


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gelu": ({}, {"activation": "gelu", "alpha": 1.0, "up_offset": 0.0}, "AITER has silu and silu"),
    "alpha": ({}, {"alpha": 1.5}, r"this is silu\(alpha=1.5, limit=7, up_offset=1\)"),
    "offset": ({}, {"up_offset": 0.0}, r"this is silu\(alpha=1.702, limit=7\)"),
    "limit after": ({}, {"limit_after": True}, "this is silu"),
    "softcap": ({}, {"up_softcap": 25.0}, "this is silu"),
    "activations": ({}, {"activations": "bf16"}, "round activations to MXFP8"),
    "unknown activations": ({}, {"activations": "fp4"}, "got 'fp4', choices are auto, mxfp8"),
    "out_dtype": ({}, {"out_dtype": torch.float32}, "the result must be bfloat16 or float16, got float32"),
    "hidden states": ({"hidden": torch.zeros(17, H)}, {}, "hidden_states must be bfloat16 or float16, got float32"),
    "bias": ({}, {"down_bias": torch.zeros(E, H)}, "drop biases silently"),
    "I": (
        {"gate_up": torch.zeros(E, 2 * 192, H), "down": torch.zeros(E, H, 192)},
        {},
        "intermediate size must be a multiple of 128, got 192",
    ),
    "H": (
        {
            "gate_up": torch.zeros(E, 2 * I, 128),
            "down": torch.zeros(E, 128, I),
            "hidden": torch.zeros(17, 128, dtype=torch.bfloat16),
        },
        {},
        "hidden size must be a multiple of 256, got 128",
    ),
    "top-k": (
        {"ids": torch.zeros(17, 255, dtype=torch.int32), "weights": torch.zeros(17, 255)},
        {},
        "top-k must be 1 to 254, got 255",
    ),
}


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("case", BAD)
def test_what_aiter_would_get_wrong_is_refused(case: str) -> None:
    tensors, keywords, message = BAD[case]
    block = Block()
    for name, tensor in tensors.items():
        setattr(block, name, tensor)
    with pytest.raises(ExpertInputError, match=message):
        block.run(**keywords)
    assert aiter_stand_in.calls == []


def test_a_limit_that_the_release_cannot_take_is_refused(tmp_path: Path) -> None:
    with aiter_stand_in.importable(tmp_path, "v0.1.16.post2"):
        with pytest.raises(ExpertInputError, match="has the limit 7 of Swiglu built in, this block has 5.0"):
            Block(gate=GateFunction(alpha=1.702, limit=5.0, up_offset=1.0)).run()
        with pytest.raises(ExpertInputError, match="has the limit None of Silu built in, this block has 5.0"):
            Block(gate=GateFunction(limit=5.0)).run()
        assert Block(gate=GateFunction()).error() <= 2e-3


def test_a_release_without_a_parameter_is_named(tmp_path: Path) -> None:
    missing = pytest.raises(ExpertInputError, match="has no parameter gate_mode, swiglu_limit; it has")
    with aiter_stand_in.importable(tmp_path, "v0.1.13.post1"), missing:
        Block().run()


BREACHES: dict[str, tuple[str, Any, str]] = {
    "int64 ids": ("topk_ids", lambda t: t.long(), "sort does nothing"),
    "ids out of range": ("topk_ids", lambda t: t - 1, "out of bounds"),
    "repeated ids": ("topk_ids", lambda t: t * 0, "twice"),
    "bf16 weights": ("topk_weight", lambda t: t.bfloat16(), "topk_weight is"),
    "a view of w1": ("w1", lambda t: t.view(t.shape), "is_shuffled is missing"),
    "mask without sentinel": ("expert_mask", lambda t: t[:-1], "end in 0"),
    "a map for a mask": ("expert_mask", lambda t: torch.arange(t.shape[0], dtype=torch.int32) - 1, "0/1"),
    "separated": ("gate_mode", lambda mode: "separated", "gate_mode"),
    "no tokens": ("hidden_states", lambda t: t[:0], "SIGFPE"),
}


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("case", BREACHES)
def test_the_stand_in_notices(case: str) -> None:
    """Each breach that the adapter must not commit is one that these tests would see."""
    name, change, message = BREACHES[case]
    block = Block()
    block.run()
    (arguments,) = aiter_stand_in.calls
    with pytest.raises(Breach, match=message):
        aiter_stand_in.fused_moe("HEAD", {**arguments, name: change(arguments[name])})


@pytest.mark.usefixtures("aiter")
def test_the_stand_in_computes_nonsense_from_another_layout() -> None:
    block = Block()
    block.run()
    (arguments,) = aiter_stand_in.calls
    plain = quantize(block.gate_up)[0]
    plain.is_shuffled = True
    wrong = aiter_stand_in.fused_moe("HEAD", {**arguments, "w1": plain})
    assert relative(wrong, block.expected()) > 0.5
