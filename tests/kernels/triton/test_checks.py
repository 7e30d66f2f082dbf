from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import Block, random_block

from moe_compile.errors import ExpertInputError
from moe_compile.kernels.triton.experts import experts
from moe_compile.spec import GateFunction


@pytest.fixture
def block() -> Block:
    return random_block(3, 2, 4, 64, 32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_states", torch.zeros(3, 65, dtype=torch.bfloat16), r"hidden_states: got shape \(3, 65\), .*\(T, 64\)"),
        ("hidden_states", torch.zeros(1, 3, 64), r"hidden_states: got shape \(1, 3, 64\)"),
        ("hidden_states", torch.zeros(3, 64).double(), r"hidden_states: got torch.float64, choices are torch.bfloat16"),
        ("topk_ids", torch.zeros(4, 2, dtype=torch.int64), r"topk_ids: got shape \(4, 2\), .*T = 3"),
        ("topk_ids", torch.zeros(3, 2, dtype=torch.int16), r"topk_ids: got torch.int16, choices are torch.int32"),
        ("topk_weights", torch.zeros(3, 1), r"topk_weights: got shape \(3, 1\), but topk_ids is shape \(3, 2\)"),
        ("topk_weights", torch.zeros(3, 2, dtype=torch.int32), r"topk_weights: got torch.int32, choices are"),
        ("gate", GateFunction("relu2", gated=False), r"packed.gate_up: got 64 rows, expected 32 .* gated=False"),
        ("expert_map", torch.zeros(2, 2, dtype=torch.int32), r"expert_map: got shape \(2, 2\)"),
        ("expert_map", torch.zeros(0, dtype=torch.int32), r"expert_map: got shape \(0,\)"),
        ("expert_map", torch.zeros(4), r"expert_map: got torch.float32, choices are torch.int32, torch.int64"),
    ],
)
def test_wrong_tensors_are_named(block: Block, field: str, value: Any, message: str) -> None:
    with pytest.raises(ExpertInputError, match=message):
        replace(block, **{field: value}).run(experts)


def test_wrong_choices_are_named(block: Block) -> None:
    with pytest.raises(ExpertInputError, match="activations: got 'fp8', choices are auto, bf16, mxfp8"):
        block.run(experts, activations="fp8")
    with pytest.raises(ExpertInputError, match="out_dtype: got torch.int32, choices are"):
        block.run(experts, out_dtype=torch.int32)


def test_another_device_is_named(block: Block) -> None:
    with pytest.raises(ExpertInputError, match="topk_ids is on cpu, but hidden_states is on meta"):
        replace(block, hidden_states=block.hidden_states.to("meta")).run(experts)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: kernels run on the CPU")
def test_the_cpu_needs_the_interpreter(block: Block) -> None:
    with pytest.raises(ExpertInputError, match="hidden_states is on the CPU.*TRITON_INTERPRET=1"):
        block.run(experts)
