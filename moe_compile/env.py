"""Every environment variable of this package, declared once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "MOE_COMPILE_"


@dataclass(frozen=True)
class EnvironmentVariable:
    """``name`` without the prefix; ``description`` is one line for ``moe-compile env`` and the documentation."""

    name: str
    description: str

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    def get(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The value, or None when unset or empty."""
        return (os.environ if environ is None else environ).get(self.full_name) or None


VARIABLES: tuple[EnvironmentVariable, ...] = (
    EnvironmentVariable("MOE_BACKEND", "the option moe_backend"),
    EnvironmentVariable("ACTIVATIONS", "the option activations"),
    EnvironmentVariable("STRICT", "the option strict (1 or 0)"),
    EnvironmentVariable("INDUCTOR", "the option inductor (1 or 0)"),
    EnvironmentVariable("MAX_REWRITES", "the option max_rewrites (a number)"),
    EnvironmentVariable("VERIFY", "the option verify (1 or 0)"),
    EnvironmentVariable("DUMP_DIR", "the option dump_dir (a folder)"),
    EnvironmentVariable("MODE", "the option mode"),
)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names that start with ``MOE_COMPILE_`` and are not declared here: most likely a spelling mistake."""
    known = {variable.full_name for variable in VARIABLES}
    names = os.environ if environ is None else environ
    return sorted(name for name in names if name.startswith(PREFIX) and name not in known)
