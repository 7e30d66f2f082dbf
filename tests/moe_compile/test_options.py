from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from moe_compile.errors import OptionError
from moe_compile.options import ACTIVATION_FORMATS, MODES, MOE_BACKENDS, CompileOptions


def test_defaults() -> None:
    assert CompileOptions.parse({}, environ={}) == CompileOptions(
        moe_backend="auto", activations="auto", strict=False, inductor=True, max_rewrites=None, mode=None
    )


@pytest.mark.parametrize("value", ["triton_native", "triton-native", "Triton-Native", "TRITON_NATIVE"])
def test_dashes_and_case_do_not_matter_in_a_backend_name(value: str) -> None:
    assert CompileOptions(moe_backend=value).moe_backend == "triton_native"


@pytest.mark.parametrize(
    ("name", "choices"), [("moe_backend", MOE_BACKENDS), ("activations", ACTIVATION_FORMATS), ("mode", MODES)]
)
def test_every_choice_is_accepted(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(CompileOptions.parse({name: choice}, environ={}), name) == choice


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("moe_backend", "tritn", ["moe_backend='tritn'", "auto, aiter, flydsl, triton", "Did you mean 'triton'?"]),
        ("moe_backend", None, ["moe_backend=None", "auto, aiter"]),
        ("moe_backend", ["triton"], ["moe_backend=['triton']"]),
        ("activations", "mxfp4", ["activations='mxfp4'", "auto, bf16, mxfp8", "Did you mean 'mxfp8'?"]),
        ("strict", "yes", ["strict='yes'", "True, False"]),
        ("strict", 1, ["strict=1", "True, False"]),
        ("inductor", None, ["inductor=None", "a dict of Inductor config patches"]),
        ("inductor", "yes", ["inductor='yes'"]),
        ("max_rewrites", -1, ["max_rewrites=-1", "None, an int >= 0"]),
        ("max_rewrites", True, ["max_rewrites=True"]),
        ("max_rewrites", 1.5, ["max_rewrites=1.5"]),
        ("mode", "reduce_overhead", ["mode='reduce_overhead'", "Did you mean 'reduce-overhead'?"]),
    ],
)
def test_a_bad_value_names_the_option_the_value_and_the_choices(name: str, value: Any, expected: list[str]) -> None:
    with pytest.raises(OptionError, match="moe_rocm: option") as caught:
        CompileOptions.parse({name: value}, environ={})
    assert isinstance(caught.value, ValueError)
    for text in expected:
        assert text in str(caught.value)


def test_an_unknown_option_names_itself_all_options_and_the_nearest() -> None:
    with pytest.raises(OptionError) as caught:
        CompileOptions.parse({"moe_backendd": "triton"}, environ={})
    message = str(caught.value)
    assert "unknown option 'moe_backendd' (value 'triton')" in message
    assert ", ".join(f.name for f in fields(CompileOptions)) in message
    assert "Did you mean 'moe_backend'?" in message


def test_an_option_name_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown option 3"):
        CompileOptions.parse({3: "x"}, environ={})  # type: ignore[dict-item]


def test_options_are_frozen() -> None:
    options = CompileOptions()
    with pytest.raises(FrozenInstanceError):
        options.strict = True  # type: ignore[misc]


class TestEnvironment:
    def test_every_variable_is_read_and_converted(self) -> None:
        environ = {
            "MOE_COMPILE_MOE_BACKEND": "triton-native",
            "MOE_COMPILE_ACTIVATIONS": "mxfp8",
            "MOE_COMPILE_STRICT": "1",
            "MOE_COMPILE_INDUCTOR": "False",
            "MOE_COMPILE_MAX_REWRITES": "3",
            "MOE_COMPILE_MODE": "reduce-overhead",
        }
        assert CompileOptions.parse(environ=environ) == CompileOptions(
            moe_backend="triton_native",
            activations="mxfp8",
            strict=True,
            inductor=False,
            max_rewrites=3,
            mode="reduce-overhead",
        )

    def test_options_win_over_the_environment(self) -> None:
        environ = {"MOE_COMPILE_STRICT": "1", "MOE_COMPILE_MOE_BACKEND": "triton"}
        options = CompileOptions.parse({"strict": False}, environ=environ)
        assert (options.strict, options.moe_backend) == (False, "triton")

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOE_COMPILE_ACTIVATIONS", "bf16")
        assert CompileOptions.parse().activations == "bf16"

    def test_an_empty_variable_is_unset(self) -> None:
        assert CompileOptions.parse(environ={"MOE_COMPILE_STRICT": ""}).strict is False

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("MOE_COMPILE_STRICT", "maybe", "MOE_COMPILE_STRICT='maybe' is not 1 or 0"),
            ("MOE_COMPILE_INDUCTOR", "2", "MOE_COMPILE_INDUCTOR='2' is not 1 or 0"),
            ("MOE_COMPILE_MAX_REWRITES", "two", "MOE_COMPILE_MAX_REWRITES='two' is not a number"),
            ("MOE_COMPILE_MAX_REWRITES", "-1", "max_rewrites=-1"),
            ("MOE_COMPILE_MOE_BACKEND", "cuda", "moe_backend='cuda'"),
        ],
    )
    def test_a_bad_value_is_named(self, name: str, value: str, expected: str) -> None:
        with pytest.raises(OptionError) as caught:
            CompileOptions.parse(environ={name: value})
        assert expected in str(caught.value)
        assert name in str(caught.value)

    def test_a_bad_variable_does_not_matter_when_the_option_is_given(self) -> None:
        options = CompileOptions.parse({"moe_backend": "triton"}, environ={"MOE_COMPILE_MOE_BACKEND": "cuda"})
        assert options.moe_backend == "triton"

    def test_an_unknown_variable_is_an_error_with_the_nearest_name(self) -> None:
        with pytest.raises(OptionError) as caught:
            CompileOptions.parse(environ={"MOE_COMPILE_STRIKT": "1"})
        assert "unknown environment variable MOE_COMPILE_STRIKT" in str(caught.value)
        assert "Did you mean 'MOE_COMPILE_STRICT'?" in str(caught.value)


class TestMode:
    def test_the_argument_fills_the_option(self) -> None:
        assert CompileOptions.parse(mode="max-autotune", environ={}).mode == "max-autotune"

    def test_the_same_mode_twice_is_fine(self) -> None:
        assert CompileOptions.parse({"mode": "default"}, mode="default", environ={}).mode == "default"

    def test_two_modes_are_an_error(self) -> None:
        with pytest.raises(OptionError, match="mode='default' and the option mode='reduce-overhead' disagree"):
            CompileOptions.parse({"mode": "reduce-overhead"}, mode="default", environ={})

    def test_the_argument_wins_over_the_environment(self) -> None:
        environ = {"MOE_COMPILE_MODE": "reduce-overhead"}
        assert CompileOptions.parse(mode="default", environ=environ).mode == "default"


class TestCacheKey:
    @pytest.mark.parametrize(
        "change",
        [
            {"moe_backend": "triton"},
            {"activations": "bf16"},
            {"strict": True},
            {"inductor": False},
            {"inductor": {}},
            {"inductor": {"max_autotune": True}},
            {"max_rewrites": 0},
            {"mode": "default"},
        ],
    )
    def test_every_option_changes_it(self, change: dict[str, Any]) -> None:
        assert CompileOptions(**change).cache_key() != CompileOptions().cache_key()

    def test_it_is_the_same_for_the_same_options(self) -> None:
        first = CompileOptions(inductor={"a": 1, "b": 2}, moe_backend="triton-native")
        second = CompileOptions(inductor={"b": 2, "a": 1}, moe_backend="triton_native")
        assert first.cache_key() == second.cache_key()

    def test_values_that_json_has_no_word_for_are_allowed(self) -> None:
        options = CompileOptions(inductor={"post_grad_custom_post_pass": len})
        assert "built-in function len" in options.cache_key()


def test_options_that_are_no_dict() -> None:
    with pytest.raises(OptionError, match="options='triton' is not a dict. Options are moe_backend, "):
        CompileOptions.parse("triton")  # type: ignore[arg-type]


def test_inductor_config_names() -> None:
    """Aliases of configs (force_disable_caches) and names in groups are known; what is not is told apart."""
    from moe_compile.torch_internals import unknown_config_names

    known = {"force_disable_caches": True, "max_autotune": True, "triton.cudagraphs": False}
    assert unknown_config_names(known) == []
    assert unknown_config_names({**known, "nope": 1, "triton.nope": 2}) == ["nope", "triton.nope"]
