import pytest

from moe_compile import errors


@pytest.mark.parametrize(
    ("value", "choices", "hint"),
    [
        ("tritn", ("triton", "aiter"), " Did you mean 'triton'?"),
        ("TRITON", ("triton", "aiter"), " Did you mean 'triton'?"),
        ("cuda", ("triton", "aiter"), ""),
        ("", ("triton",), ""),
        (
            "MOE_COMPILE_BACKEND",
            ("MOE_COMPILE_MOE_BACKEND", "MOE_COMPILE_MODE"),
            " Did you mean 'MOE_COMPILE_MOE_BACKEND'?",
        ),
    ],
)
def test_nearest_names_the_closest_spelling_or_nothing(value: str, choices: tuple[str, ...], hint: str) -> None:
    assert errors.nearest(value, choices) == hint


def test_every_error_is_a_moe_compile_error_and_a_builtin_one() -> None:
    """Callers can catch ValueError without importing this package."""
    classes = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    public = [e for e in classes if e is not errors.MoeCompileError]
    assert {e.__name__ for e in public} >= {"OptionError", "BackendRefused", "RewriteRefused", "ExpertInputError"}
    for error in public:
        assert issubclass(error, errors.MoeCompileError), error
        assert issubclass(error, ValueError | RuntimeError | ImportError), error
