"""Which backend runs a block: a pure function of (options, spec, target, capabilities), with every reason kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_compile.errors import BackendRefused
from moe_compile.options import CompileOptions
from moe_compile.spec import ExpertSpec
from moe_compile.target import Capabilities, Target

AUTO_ORDER: tuple[str, ...] = ("aiter", "flydsl", "triton_native", "triton", "reference")


@dataclass(frozen=True)
class Rejection:
    """One reason why a backend cannot run a block. ``remedy`` says what to install or change, if anything helps."""

    backend: str
    reason: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True)
class Caution:
    """Something to know about a backend that can run a block. ``remedy`` is the way out."""

    backend: str
    text: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.backend}: {self.text}" + (f" ({self.remedy})" if self.remedy else "")


class Backend(Protocol):
    """What selection asks of a kernel backend."""

    @property
    def name(self) -> str: ...

    def rejections(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Rejection]:
        """Every reason, not the first. ``spec=None`` asks about the machine alone."""
        ...

    def cautions(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Caution]:
        """What to know about a block that the backend would run; with ``spec=None``, in general."""
        ...


@dataclass(frozen=True)
class Selection:
    """``rejected`` holds every reason of every backend that ``auto`` passed over, in order."""

    backend: str
    rejected: tuple[Rejection, ...] = ()
    cautions: tuple[Caution, ...] = ()


def select_backend(
    options: CompileOptions,
    spec: ExpertSpec,
    target: Target,
    capabilities: Capabilities,
    backends: Mapping[str, Backend],
) -> Selection:
    """Take or refuse an explicit choice; for ``auto`` the first usable backend of ``AUTO_ORDER``.

    Raises:
        BackendRefused (a ValueError): the explicit choice cannot run this block, with every reason.
    """
    if options.moe_backend != "auto":
        name = options.moe_backend
        reasons = backends[name].rejections(spec, target, capabilities, options)
        if reasons:
            lines = "".join(f"\n  - {r.reason}" + (f" ({r.remedy})" if r.remedy else "") for r in reasons)
            raise BackendRefused(
                f"moe_rocm: moe_backend={name!r} cannot run this expert block "
                f"({spec.sizes}, {spec.gate}, {spec.weight_format} weights) on {target.arch}:{lines}\n"
                "Choose another moe_backend, or 'auto' for the first that can."
            )
        return Selection(name, cautions=tuple(backends[name].cautions(spec, target, capabilities, options)))
    rejected: list[Rejection] = []
    for name in AUTO_ORDER:
        reasons = backends[name].rejections(spec, target, capabilities, options)
        if not reasons:
            cautions = backends[name].cautions(spec, target, capabilities, options)
            return Selection(name, tuple(rejected), tuple(cautions))
        rejected.extend(reasons)
    raise BackendRefused(
        f"moe_rocm: no backend can run this expert block ({spec.sizes}, {spec.gate}) on {target.arch}:"
        + "".join(f"\n  - {r}" for r in rejected)
    )
