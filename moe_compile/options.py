"""``torch.compile(..., options={...})``: every option, its values and its meaning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moe_compile.env import VARIABLES, unknown_variables
from moe_compile.errors import OptionError, nearest

MOE_BACKENDS: tuple[str, ...] = ("auto", "aiter", "flydsl", "triton", "triton_native", "reference")
ACTIVATION_FORMATS: tuple[str, ...] = ("auto", "bf16", "mxfp8")
MODES: tuple[str, ...] = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileOptions:
    """The options of the ``moe_rocm`` backend, checked when made.

    Raises:
        OptionError (a ValueError): names the option, the value, the choices and the nearest spelling.
    """

    moe_backend: str = field(default="auto", metadata={"doc": "which kernels run the expert blocks"})
    activations: str = field(default="auto", metadata={"doc": "bf16: a16w8 GEMMs; mxfp8: a8w8 GEMMs"})
    strict: bool = field(default=False, metadata={"doc": "an MoE block that is not rewritten is an error"})
    inductor: bool | Mapping[str, Any] = field(
        default=True, metadata={"doc": "True, False (AOTAutograd only) or a dict of Inductor config patches"}
    )
    max_rewrites: int | None = field(
        default=None, metadata={"doc": "rewrite only the first N blocks of each graph, to bisect a wrong result"}
    )
    verify: bool = field(
        default=False, metadata={"doc": "on the first run, compare each rewritten block with the original"}
    )
    dump_dir: str | os.PathLike[str] | None = field(
        default=None, metadata={"doc": "a folder for the graphs and the report; compiles without caches"}
    )
    mode: str | None = field(
        default=None, metadata={"doc": "a torch.compile mode; torch.compile takes mode= or options=, never both"}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_backend", _choice("moe_backend", self.moe_backend, MOE_BACKENDS))
        object.__setattr__(self, "activations", _choice("activations", self.activations, ACTIVATION_FORMATS))
        if not isinstance(self.strict, bool):
            raise _bad("strict", self.strict, ("True", "False"))
        if not isinstance(self.verify, bool):
            raise _bad("verify", self.verify, ("True", "False"))
        if not isinstance(self.inductor, bool | Mapping):
            raise _bad("inductor", self.inductor, ("True", "False", "a dict of Inductor config patches"))
        if self.max_rewrites is not None:
            if isinstance(self.max_rewrites, bool) or not isinstance(self.max_rewrites, int) or self.max_rewrites < 0:
                raise _bad("max_rewrites", self.max_rewrites, ("None", "an int >= 0"))
        if self.dump_dir is not None:
            if not isinstance(self.dump_dir, str | os.PathLike) or not os.fspath(self.dump_dir):
                raise _bad("dump_dir", self.dump_dir, ("None", "the path of a folder"))
            object.__setattr__(self, "dump_dir", os.fspath(self.dump_dir))
        if self.mode is not None:
            object.__setattr__(self, "mode", _choice("mode", self.mode, MODES, fold=False))

    @classmethod
    def parse(
        cls,
        options: Mapping[str, Any] | None = None,
        *,
        mode: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> CompileOptions:
        """``options`` over the environment over the defaults. ``mode`` is torch.compile's own argument."""
        names = [f.name for f in fields(cls)]
        if not isinstance(options or {}, Mapping):
            raise OptionError(f"moe_rocm: options={options!r} is not a dict. Options are {', '.join(names)}.")
        given = dict(options or {})
        for key, value in given.items():
            if key not in names:
                raise OptionError(
                    f"moe_rocm: unknown option {key!r} (value {value!r}). Options are {', '.join(names)}."
                    + nearest(str(key), names)
                )
        if mode is not None:
            if given.get("mode") not in (None, mode):
                raise OptionError(f"moe_rocm: mode={mode!r} and the option mode={given['mode']!r} disagree")
            given["mode"] = mode
        return cls(**_from_environment(environ, given) | given)

    def cache_key(self) -> str:
        """A string that differs whenever two option sets could compile a graph differently."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, sort_keys=True, default=repr)


def _bad(name: str, value: object, choices: tuple[str, ...]) -> OptionError:
    return OptionError(
        f"moe_rocm: option {name}={value!r} is not valid. Choices are {', '.join(choices)}."
        + nearest(str(value), choices)
    )


def _choice(name: str, value: object, choices: tuple[str, ...], *, fold: bool = True) -> str:
    """The choice itself; upper case and ``-`` for ``_`` are accepted when ``fold`` is True."""
    if isinstance(value, str):
        text = value.lower().replace("-", "_") if fold else value
        if text in choices:
            return text
    raise _bad(name, value, choices)


def _bool(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


_PARSERS: dict[str, Callable[[str], Any]] = {"strict": _bool, "verify": _bool, "inductor": _bool, "max_rewrites": int}


def _from_environment(environ: Mapping[str, str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options set by the environment, each checked here so that a bad value is blamed on its variable."""
    names = [variable.full_name for variable in VARIABLES]
    for unknown in unknown_variables(environ):
        raise OptionError(
            f"moe_rocm: unknown environment variable {unknown}. Known are {', '.join(names)}." + nearest(unknown, names)
        )
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        text, option = variable.get(environ), variable.name.lower()
        if text is None or option in given:
            continue
        try:
            values[option] = _PARSERS.get(option, str)(text)
        except (KeyError, ValueError):
            expected = "a number" if _PARSERS[option] is int else "1 or 0"
            raise OptionError(
                f"moe_rocm: environment variable {variable.full_name}={text!r} is not {expected}"
            ) from None
        try:
            CompileOptions(**{option: values[option]})
        except OptionError as error:
            raise OptionError(f"{error} It comes from the environment variable {variable.full_name}.") from None
    return values
