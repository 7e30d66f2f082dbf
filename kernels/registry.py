"""The backends that ``moe_backend`` names, and what each can run. Adding one: see kernels/README.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from moe_compile.aiter_package import RUNTIME_LIMIT, TUNED
from moe_compile.errors import BackendRefused
from moe_compile.kernels.aiter_flydsl import limits as aiter_limits
from moe_compile.options import CompileOptions
from moe_compile.selection import AUTO_ORDER, Caution, Rejection, Selection
from moe_compile.spec import ExpertSpec
from moe_compile.target import Capabilities, Target

# A rule returns (reason, remedy) if the backend cannot run the block. ``spec`` is None when only the machine is asked.
Reason = tuple[str, str | None]
MachineRule = Callable[[Target, Capabilities, CompileOptions], Reason | None]
BlockRule = Callable[[ExpertSpec, Target, CompileOptions], Reason | None]
BlockReasons = Callable[[ExpertSpec, Capabilities], Iterable[Reason]]  # any number, where the package matters too
CautionRule = Callable[[ExpertSpec | None, Capabilities], Reason | None]


@dataclass(frozen=True)
class KernelBackend:
    """A backend as two lists of rules; all of them are asked, so that every reason is kept."""

    name: str
    machine_rules: tuple[MachineRule, ...] = ()
    block_rules: tuple[BlockRule, ...] = field(default=())
    block_reasons: tuple[BlockReasons, ...] = field(default=())
    caution_rules: tuple[CautionRule, ...] = field(default=())

    def rejections(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Rejection]:
        found = [rule(target, capabilities, options) for rule in self.machine_rules]
        if spec is not None:
            found += [rule(spec, target, options) for rule in self.block_rules]
            found += [reason for reasons in self.block_reasons for reason in reasons(spec, capabilities)]
        return [Rejection(self.name, *reason) for reason in found if reason is not None]

    def cautions(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Caution]:
        found = [rule(spec, capabilities) for rule in self.caution_rules]
        return [Caution(self.name, *caution) for caution in found if caution is not None]


def _needs_gfx950(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    if target.arch != "gfx950":
        return f"needs gfx950 (MI350, MI355X), this is {target.arch}", None
    return None


def _needs_aiter(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    return (capabilities.aiter.problem, capabilities.aiter.remedy) if capabilities.aiter.problem else None


def _aiter_activations(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    return aiter_limits.activations_reason(options.activations)


def _aiter_block(spec: ExpertSpec, capabilities: Capabilities) -> Iterable[Reason]:
    # Without AITER, what a newer one could do counts: that AITER is missing is said already.
    usable = capabilities.aiter.usable
    return aiter_limits.block_reasons(spec, runtime_limit=not usable or RUNTIME_LIMIT in capabilities.aiter.features)


def _aiter_hazard(spec: ExpertSpec | None, capabilities: Capabilities) -> Reason | None:
    return aiter_limits.hazard(spec)


def _aiter_untuned(spec: ExpertSpec | None, capabilities: Capabilities) -> Reason | None:
    tuned = [name.removeprefix(TUNED) for name in capabilities.aiter.features if name.startswith(TUNED)]
    return aiter_limits.untuned(spec, tuned)


def _needs_flydsl(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    return (capabilities.flydsl.problem, None) if capabilities.flydsl.problem else None


def _not_in_this_version(what: str) -> MachineRule:
    def rule(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
        return f"this version of moe_compile has no {what} yet", None

    return rule


def _needs_triton(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    return (capabilities.triton.problem, None) if capabilities.triton.problem else None


def _needs_triton_device(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    if target.device_type == "cuda":
        return None
    if capabilities.triton_interpreted:
        if options.moe_backend == "auto":
            return "Triton's interpreter is for tests, so auto does not choose it", "moe_backend='triton' does"
        return None
    return f"needs a CUDA or ROCm GPU, this is {target.device_type}", None


def _needs_block_scaling(target: Target, capabilities: Capabilities, options: CompileOptions) -> Reason | None:
    if not target.has_block_scaled_mma:
        return f"needs block-scaled matrix instructions (gfx950, sm_100 or newer), this is {target.arch}", None
    return None


def _triton_dtypes(spec: ExpertSpec, target: Target, options: CompileOptions) -> Reason | None:
    if spec.activation_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"hidden states must be bf16, fp16 or fp32, got {spec.activation_dtype}", None
    return None


BACKENDS: dict[str, KernelBackend] = {
    backend.name: backend
    for backend in (
        KernelBackend(
            "aiter",
            (_needs_gfx950, _needs_aiter, _aiter_activations),
            block_reasons=(_aiter_block,),
            caution_rules=(_aiter_hazard, _aiter_untuned),
        ),
        KernelBackend("flydsl", (_needs_gfx950, _needs_flydsl, _not_in_this_version("FlyDSL kernels"))),
        KernelBackend(
            "triton_native", (_needs_block_scaling, _needs_triton, _not_in_this_version("block-scaled Triton kernels"))
        ),
        KernelBackend("triton", (_needs_triton, _needs_triton_device), (_triton_dtypes,)),
        KernelBackend("reference"),
    )
}
assert tuple(BACKENDS) == AUTO_ORDER


def refuse_hopeless_choice(options: CompileOptions, machine: Sequence[Target], capabilities: Capabilities) -> None:
    """Refuse an explicit ``moe_backend`` that no device of this machine can run, whatever the block.

    Args:
        machine: the targets here, the preferred one first; the message gives its reasons.

    Raises:
        BackendRefused (a ValueError): with every reason.
    """
    if options.moe_backend == "auto":
        return
    backend = BACKENDS[options.moe_backend]
    reasons = [backend.rejections(None, target, capabilities, options) for target in machine]
    if all(reasons):
        lines = "".join(f"\n  - {r.reason}" + (f" ({r.remedy})" if r.remedy else "") for r in reasons[0])
        raise BackendRefused(
            f"moe_rocm: moe_backend={backend.name!r} cannot run on this machine ({machine[0].arch}):{lines}\n"
            "Choose another moe_backend, or 'auto' for the first that can."
        )


def missing_package(selection: Selection, capabilities: Capabilities) -> Rejection | None:
    """The first backend that was passed over for nothing but a package that is not installed, if there is one."""
    problems = {capabilities.triton.problem, capabilities.aiter.problem, capabilities.flydsl.problem}
    for name in BACKENDS:
        reasons = [rejection for rejection in selection.rejected if rejection.backend == name]
        if len(reasons) == 1 and reasons[0].reason in problems:
            return reasons[0]
    return None


@dataclass(frozen=True)
class BackendAvailability:
    """One backend on one machine: ``usable`` if ``rejections`` is empty.

    ``cautions``: what to know before using it, where it is usable. ``versions``: of the packages that it needs, None
    for one that is not installed.
    """

    name: str
    rejections: tuple[Rejection, ...]
    cautions: tuple[Caution, ...] = ()
    versions: tuple[tuple[str, str | None], ...] = ()

    @property
    def usable(self) -> bool:
        return not self.rejections


def available_backends(spec: ExpertSpec | None = None, device: torch.device | None = None) -> list[BackendAvailability]:
    """Every ``moe_backend`` in the order in which ``auto`` tries them, with every reason why it cannot be used here.

    Args:
        spec: a block (``LayerReport.spec``); None asks about the machine alone.
        device: default: the current GPU if there is one, else the CPU.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, capabilities = Target.of(device), Capabilities.detect()
    return [_availability(backend, spec, target, capabilities) for backend in BACKENDS.values()]


_PACKAGES: dict[str, tuple[str, ...]] = {
    "aiter": ("aiter", "flydsl"),
    "flydsl": ("flydsl",),
    "triton_native": ("triton",),
    "triton": ("triton",),
    "reference": (),
}


def _availability(
    backend: KernelBackend, spec: ExpertSpec | None, target: Target, capabilities: Capabilities
) -> BackendAvailability:
    options = CompileOptions(moe_backend=backend.name)
    rejections = backend.rejections(spec, target, capabilities, options)
    cautions = [] if rejections else backend.cautions(spec, target, capabilities, options)
    versions = capabilities.versions()
    return BackendAvailability(
        backend.name,
        tuple(rejections),
        tuple(cautions),
        tuple((name, versions[name]) for name in _PACKAGES[backend.name]),
    )
