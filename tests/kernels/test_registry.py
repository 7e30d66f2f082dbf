"""Which backend can run what where, as a table, and the sentences that say so."""

from __future__ import annotations

import pytest
import torch

import moe_compile
from moe_compile.errors import BackendRefused
from moe_compile.kernels.registry import BACKENDS, available_backends, missing_package, refuse_hopeless_choice
from moe_compile.options import CompileOptions
from moe_compile.selection import AUTO_ORDER, Rejection, select_backend
from moe_compile.spec import ExpertSpec
from moe_compile.target import Capabilities, Package, Target

CPU = Target("cpu", "cpu")
TARGETS = {
    "cpu": CPU,
    **{arch: Target("cuda", arch) for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")},
}
SPEC = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2)
FULL = Capabilities(triton=Package("3.7.1"), aiter=Package("0.2"), flydsl=Package("0.4"))
BARE = Capabilities(
    triton=Package(problem="triton is not installed (pip install 'triton>=3.6')"),
    aiter=Package(problem="aiter is not installed (build ROCm/aiter from source)"),
    flydsl=Package(problem="flydsl is not installed (pip install flydsl)"),
)
INTERPRETED = Capabilities(triton=Package("3.7.1"), triton_interpreted=True)

# SPEC is too small for AITER; what else it says is in aiter_flydsl/test_selection.py.
AITER_SIZES = [
    "hidden size must be a multiple of 256, got 64",
    "intermediate size must be a multiple of 128, got 96: AITER does not check it and reads beyond the weights",
]
NO_FLYDSL_YET = "this version of moe_compile has no FlyDSL kernels yet"
NO_NATIVE_YET = "this version of moe_compile has no block-scaled Triton kernels yet"


def reasons(name: str, target: Target, capabilities: Capabilities, moe_backend: str | None = None) -> list[str]:
    options = CompileOptions(moe_backend=moe_backend or name)
    found = BACKENDS[name].rejections(SPEC, target, capabilities, options)
    assert all(rejection.backend == name for rejection in found)
    return [rejection.reason for rejection in found]


@pytest.mark.parametrize("arch", TARGETS)
def test_aiter_and_flydsl(arch: str) -> None:
    wrong = [] if arch == "gfx950" else [f"needs gfx950 (MI350, MI355X), this is {arch}"]
    target = TARGETS[arch]
    assert reasons("aiter", target, FULL) == [*wrong, *AITER_SIZES]
    assert reasons("aiter", target, BARE) == [*wrong, BARE.aiter.problem, *AITER_SIZES]
    assert reasons("flydsl", target, FULL) == [*wrong, NO_FLYDSL_YET]
    assert reasons("flydsl", target, BARE) == [*wrong, BARE.flydsl.problem, NO_FLYDSL_YET]


@pytest.mark.parametrize("arch", TARGETS)
def test_triton_native(arch: str) -> None:
    wrong = [f"needs block-scaled matrix instructions (gfx950, sm_100 or newer), this is {arch}"]
    expected = [] if arch in ("gfx950", "sm_100", "sm_120") else wrong
    assert reasons("triton_native", TARGETS[arch], FULL) == [*expected, NO_NATIVE_YET]
    assert reasons("triton_native", TARGETS[arch], BARE) == [*expected, BARE.triton.problem, NO_NATIVE_YET]


@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch != "cpu"])
def test_triton_runs_on_every_gpu(arch: str) -> None:
    assert reasons("triton", TARGETS[arch], FULL) == []
    assert reasons("triton", TARGETS[arch], BARE) == [BARE.triton.problem]


def test_triton_on_a_cpu_needs_the_interpreter() -> None:
    assert reasons("triton", CPU, FULL) == ["needs a CUDA or ROCm GPU, this is cpu"]
    assert reasons("triton", CPU, INTERPRETED) == []
    assert reasons("triton", CPU, INTERPRETED, "auto") == [
        "Triton's interpreter is for tests, so auto does not choose it"
    ]


def test_triton_takes_float_hidden_states_only() -> None:
    spec = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, activation_dtype=torch.float64)
    found = BACKENDS["triton"].rejections(spec, TARGETS["sm_90"], FULL, CompileOptions(moe_backend="triton"))
    assert [r.reason for r in found] == ["hidden states must be bf16, fp16 or fp32, got torch.float64"]


@pytest.mark.parametrize("capabilities", [FULL, BARE])
@pytest.mark.parametrize("arch", TARGETS)
def test_the_reference_runs_anywhere(arch: str, capabilities: Capabilities) -> None:
    assert reasons("reference", TARGETS[arch], capabilities) == []


AUTO = dict.fromkeys(TARGETS, "triton") | {"cpu": "reference"}


@pytest.mark.parametrize("arch", TARGETS)
def test_auto_takes_the_first_that_runs_and_keeps_every_reason(arch: str) -> None:
    selection = select_backend(CompileOptions(), SPEC, TARGETS[arch], FULL, BACKENDS)
    assert selection.backend == AUTO[arch]
    passed_over = AUTO_ORDER[: AUTO_ORDER.index(selection.backend)]
    assert list(dict.fromkeys(r.backend for r in selection.rejected)) == list(passed_over)
    expected = [
        rejection
        for name in passed_over
        for rejection in BACKENDS[name].rejections(SPEC, TARGETS[arch], FULL, CompileOptions())
    ]
    assert list(selection.rejected) == expected


def test_auto_never_fails() -> None:
    for target in TARGETS.values():
        assert select_backend(CompileOptions(), SPEC, target, BARE, BACKENDS).backend == "reference"


@pytest.mark.parametrize(
    ("arch", "missing"), [("sm_90", BARE.triton.problem), ("gfx942", BARE.triton.problem), ("cpu", None)]
)
def test_the_package_that_alone_is_missing(arch: str, missing: str | None) -> None:
    selection = select_backend(CompileOptions(), SPEC, TARGETS[arch], BARE, BACKENDS)
    found = missing_package(selection, BARE)
    assert (found and found.reason) == missing
    assert missing_package(select_backend(CompileOptions(), SPEC, TARGETS[arch], FULL, BACKENDS), FULL) is None


class TestHopelessChoice:
    def test_every_reason_of_the_preferred_device(self) -> None:
        with pytest.raises(BackendRefused) as caught:
            refuse_hopeless_choice(CompileOptions(moe_backend="aiter"), (TARGETS["gfx942"], CPU), BARE)
        for part in ("'aiter'", "gfx942", "MI355X", "build ROCm/aiter from source", "'auto'"):
            assert part in str(caught.value)

    def test_one_device_that_could_is_enough(self) -> None:
        refuse_hopeless_choice(CompileOptions(moe_backend="triton"), (CPU, TARGETS["sm_90"]), FULL)

    def test_auto_and_the_reference_are_never_refused(self) -> None:
        for name in ("auto", "reference"):
            refuse_hopeless_choice(CompileOptions(moe_backend=name), (CPU,), BARE)


class TestAvailableBackends:
    def test_on_this_cpu(self) -> None:
        found = available_backends(device=torch.device("cpu"))
        assert tuple(one.name for one in found) == AUTO_ORDER
        usable = {one.name: one.usable for one in found}
        assert usable["reference"]
        assert not usable["aiter"]
        assert not usable["flydsl"]
        assert not usable["triton_native"]
        for one in found:
            assert one.usable == (one.rejections == ())
            assert one.usable or not one.cautions
            assert all(isinstance(r, Rejection) and r.backend == one.name for r in one.rejections)

    def test_versions_of_what_each_needs(self) -> None:
        found = {one.name: dict(one.versions) for one in available_backends(device=torch.device("cpu"))}
        versions = Capabilities.detect().versions()
        assert found == {
            "aiter": {name: versions[name] for name in ("aiter", "flydsl")},
            "flydsl": {"flydsl": versions["flydsl"]},
            "triton_native": {"triton": versions["triton"]},
            "triton": {"triton": versions["triton"]},
            "reference": {},
        }

    def test_of_a_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: TARGETS["sm_90"]))
        monkeypatch.setattr(Capabilities, "detect", classmethod(lambda cls: FULL))
        spec = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, activation_dtype=torch.float64)
        of_machine = {one.name: one for one in moe_compile.available_backends()}
        of_block = {one.name: one for one in moe_compile.available_backends(spec)}
        assert of_machine["triton"].usable
        assert [r.reason for r in of_block["triton"].rejections] == [
            "hidden states must be bf16, fp16 or fp32, got torch.float64"
        ]
