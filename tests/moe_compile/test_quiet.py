import logging
import warnings

import pytest
import torch

from moe_compile.quiet import one_line, without_torch_noise


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (
            RuntimeError("What\n  Explanation: why\n  Hint: a\n\nfrom user code:\n  File x"),
            "RuntimeError: What Explanation: why",
        ),
    ],
)
def test_one_line(error: Exception, text: str) -> None:
    assert one_line(error) == text


def test_the_error_of_a_compiled_model_keeps_its_cause_and_loses_the_advice() -> None:
    model = torch.compile(torch.nn.Linear(3, 4), backend="eager")
    with without_torch_noise(), pytest.raises(Exception, match="must have same reduction dim") as caught:
        model(torch.ones(1, 5))
    text = one_line(caught.value)
    assert "a and b must have same reduction dim, but got [1, 5] X [3, 4]." in text
    for advice in ("Hint", "from user code", "TORCHDYNAMO_VERBOSE"):
        assert advice not in text


@pytest.mark.parametrize(("quiet", "torch_logs", "heard"), [(True, "", 1), (False, "", 3), (True, "+dynamo", 3)])
def test_noise_is_hidden_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, torch_logs: str, heard: int
) -> None:
    monkeypatch.setenv("TORCH_LOGS", torch_logs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with without_torch_noise(quiet):
            warnings.warn("Dynamo detected a call to a `functools.lru_cache`-wrapped function", stacklevel=1)
            warnings.warn("dynamo_pgo force disabled by torch.compiler.config.force_disable_caches", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert len(caught) == heard


def test_the_log_level_comes_back_after_an_error() -> None:
    logger = logging.getLogger("torch")
    before, inside = logger.level, []

    def fail() -> None:
        inside.append(logger.level)
        raise KeyError

    with pytest.raises(KeyError), without_torch_noise():
        fail()
    assert inside == [logging.CRITICAL]
    assert logger.level == before
