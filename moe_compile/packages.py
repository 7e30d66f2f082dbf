"""One kernel package as found in this environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A version, or the reasons why the package cannot be used, and what helps.

    ``features`` names what some versions of the package have and others have not.
    """

    version: str | None = None
    problem: str | None = None
    remedy: str | None = None
    features: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return self.problem is None


def version_of(distribution: str) -> str:
    """``unknown`` for a package that runs from a source tree."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def installed(name: str, remedy: str) -> Package:
    """A package whose distribution has the same name. Imports nothing."""
    if importlib.util.find_spec(name) is None:
        return Package(problem=f"{name} is not installed ({remedy})")
    return Package(version=version_of(name))
