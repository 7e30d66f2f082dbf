"""A trained MiniMax-M3 answers held-out arithmetic as well with MXFP8 experts as in bf16, by a paired test.

The model is made by train_arithmetic.py beside this file.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moe_compile import report

pytestmark = pytest.mark.hf

MIN_ACCURACY = 0.97
MAX_P_REJECTED = 0.01
MAX_PERPLEXITY_CHANGE = 0.01
BLOCKS = 2


@pytest.fixture(scope="module")
def model() -> Any:
    from accuracy_table import MODEL
    from train_arithmetic import load_model

    if not (MODEL / "model.safetensors").exists():
        pytest.skip("tests/accuracy/model is missing: run python tests/accuracy/train_arithmetic.py on a GPU")
    return load_model(MODEL).eval()


@pytest.fixture(scope="module")
def original(model: Any) -> Any:
    import arithmetic

    return arithmetic.evaluate(model, arithmetic.exam_problems())


def check(model: Any, original: Any, moe_backend: str, variant: str, device: str) -> None:
    import arithmetic
    from accuracy_table import mcnemar, perplexity_change, rewritten

    compiled = rewritten(model, moe_backend, variant)
    scores = arithmetic.evaluate(compiled, arithmetic.exam_problems(), device)
    merged = report.merge(report.reports())
    assert (merged.rewritten, merged.skipped) == (BLOCKS, 0)
    assert {layer.moe_backend for layer in merged.layers} == {moe_backend}
    assert not torch.equal(scores.nll, original.nll), "nothing was quantised"
    assert mcnemar(original.correct, scores.correct) > MAX_P_REJECTED
    assert perplexity_change(original, scores) < MAX_PERPLEXITY_CHANGE


def test_the_original_is_nearly_always_right(original: Any) -> None:
    assert len(original.correct) == 1000
    assert original.accuracy >= MIN_ACCURACY


@pytest.mark.parametrize("variant", ["a16w8", "a8w8"])
def test_rewritten_is_as_accurate_as_bf16(model: Any, original: Any, variant: str) -> None:
    check(model, original, "reference", variant, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("moe_backend", ["reference", "triton"])
@pytest.mark.parametrize("variant", ["a16w8", "a8w8"])
def test_rewritten_is_as_accurate_as_bf16_on_a_gpu(model: Any, moe_backend: str, variant: str) -> None:
    import arithmetic

    on_gpu = copy.deepcopy(model).cuda()
    original = arithmetic.evaluate(on_gpu, arithmetic.exam_problems())
    check(on_gpu, original, moe_backend, variant, "cuda")


def test_right_under_teacher_forcing_is_right_greedily(model: Any, original: Any) -> None:
    import arithmetic

    exam = arithmetic.exam_problems()
    wrong = (~original.correct).nonzero().flatten()[:8]
    chosen = torch.cat([torch.arange(0, 1000, 62), wrong])
    answers = arithmetic.answer_greedily(model, exam[chosen])
    right = (answers == arithmetic.encode(exam[chosen])).all(1)
    assert torch.equal(right, original.correct[chosen])


def test_the_paired_test_notices_damaged_experts(model: Any, original: Any) -> None:
    """The experts of one layer exchanged in pairs: what a wrong order of packed weights would do."""
    import arithmetic
    from accuracy_table import mcnemar, perplexity_change

    damaged = copy.deepcopy(model)
    with torch.no_grad():
        weight = damaged.model.layers[-1].mlp.experts.down_proj
        weight.copy_(weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))
    scores = arithmetic.evaluate(damaged, arithmetic.exam_problems())
    assert mcnemar(original.correct, scores.correct) < MAX_P_REJECTED
    assert perplexity_change(original, scores) > MAX_PERPLEXITY_CHANGE


@pytest.mark.parametrize(("gained", "lost", "expected"), [(0, 0, 1.0), (3, 3, 1.0), (0, 8, 2 / 256), (1, 5, 14 / 64)])
def test_the_exact_mcnemar_test(gained: int, lost: int, expected: float) -> None:
    from accuracy_table import mcnemar

    first = torch.tensor([False] * gained + [True] * lost + [True] * 5 + [False] * 2)
    second = torch.tensor([True] * gained + [False] * lost + [True] * 5 + [False] * 2)
    assert mcnemar(first, second) == pytest.approx(expected)


def test_held_out_problems_are_in_no_training_batch() -> None:
    import arithmetic

    trained = torch.cat([arithmetic.training_problems(operation) for operation in range(3)])
    exam, validation = arithmetic.exam_problems(), arithmetic.validation_problems()
    assert len(exam.unique()) == 1000
    assert not torch.isin(exam, validation).any()
    swapped = exam // 1_000_000 * 1_000_000 + exam % 1000 * 1000 + exam // 1000 % 1000
    for codes in (exam, validation, swapped):
        assert not torch.isin(codes, trained).any()


def test_the_text_of_a_problem_is_right() -> None:
    import arithmetic

    for tokens in arithmetic.encode(arithmetic.exam_problems()[::37]):
        question, answer = arithmetic.text(tokens).removesuffix(".").split("? ")
        a, operation, b = question.split()
        expected = {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[operation]
        assert int(answer.split()[-1][::-1]) == expected
