from dataclasses import fields

import pytest

from moe_compile import env
from moe_compile.options import CompileOptions


def test_every_option_has_a_variable_of_its_name() -> None:
    assert {v.name.lower() for v in env.VARIABLES} >= {f.name for f in fields(CompileOptions)}


def test_every_variable_has_a_one_line_description() -> None:
    for variable in env.VARIABLES:
        assert variable.description, variable.full_name
        assert "\n" not in variable.description, variable.full_name


def test_unset_and_empty_read_as_none() -> None:
    variable = env.VARIABLES[0]
    assert variable.get({}) is None
    assert variable.get({variable.full_name: ""}) is None
    assert variable.get({variable.full_name: "triton"}) == "triton"


def test_get_reads_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPILE_MOE_BACKEND", "reference")
    assert env.VARIABLES[0].full_name == "MOE_COMPILE_MOE_BACKEND"
    assert env.VARIABLES[0].get() == "reference"


def test_unknown_variables_are_those_with_our_prefix_alone() -> None:
    environ = {"MOE_COMPILE_BACKEND": "x", "MOE_COMPILE_MODE": "default", "MOE_OTHER": "1", "PATH": "/bin"}
    assert env.unknown_variables(environ) == ["MOE_COMPILE_BACKEND"]
