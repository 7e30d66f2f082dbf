"""When `aiter` is taken, and every reason when it is not. Packages are probed from real files; GPUs are only named."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiter_stand_in
import pytest
import torch
from typer.testing import CliRunner

from moe_compile import aiter_package
from moe_compile.cli import app
from moe_compile.errors import BackendRefused
from moe_compile.kernels.registry import BACKENDS, available_backends, missing_package, refuse_hopeless_choice
from moe_compile.options import CompileOptions
from moe_compile.selection import Rejection, Selection, select_backend
from moe_compile.spec import ExpertSpec, GateFunction
from moe_compile.target import Capabilities, Package, Target

M3_GATE = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)
M3 = ExpertSpec(128, 6144, 768, 4, gate=M3_GATE)
SMALL = ExpertSpec(8, 256, 128, 2, gate=M3_GATE)
GFX950 = Target("cuda", "gfx950")

Detect = Callable[..., Capabilities]


@pytest.fixture(scope="module")
def detect(tmp_path_factory: pytest.TempPathFactory) -> Detect:
    """(AITER release or None, FlyDSL version or None) -> what a probe of such an installation finds."""

    @functools.cache
    def capabilities(release: str | None, flydsl: str | None) -> Capabilities:
        found = Package(version=flydsl) if flydsl else Package(problem="flydsl is not installed (pip install flydsl)")
        if release is None:
            missing = Package(problem="aiter is not installed (build ROCm/aiter from source)")
            return Capabilities(Package("3.7.1"), missing, found)
        with aiter_stand_in.importable(tmp_path_factory.mktemp("site"), release, flydsl):
            return Capabilities(Package("3.7.1"), aiter_package.find(import_it=True), found)

    return capabilities


@dataclass(frozen=True)
class Case:
    """No ``reasons``: aiter is taken."""

    spec: ExpertSpec = SMALL
    arch: str = "gfx950"
    aiter: str | None = "HEAD"
    flydsl: str | None = "0.3.1"
    activations: str = "auto"
    reasons: tuple[str, ...] = ()
    remedies: tuple[str, ...] = field(default=())


def block(**changes: Any) -> ExpertSpec:
    return replace(SMALL, **changes)


def gate(**changes: Any) -> ExpertSpec:
    return replace(SMALL, gate=replace(M3_GATE, **changes))


def this_is(text: str) -> str:
    return f"AITER has silu and silu(alpha=1.702, up_offset=1), each with a limit before; this is {text}"


def wrong_intermediate(size: int) -> str:
    return (
        f"intermediate size must be a multiple of 128, got {size}: AITER does not check it and reads beyond the weights"
    )


TABLE = {
    # architectures
    "gfx950": Case(),
    "gfx942": Case(arch="gfx942", reasons=("needs gfx950 (MI350, MI355X), this is gfx942",)),
    "sm_100": Case(arch="sm_100", reasons=("needs gfx950 (MI350, MI355X), this is sm_100",)),
    # releases of AITER
    "no aiter": Case(aiter=None, reasons=("aiter is not installed (build ROCm/aiter from source)",)),
    "0.1.16": Case(
        aiter="v0.1.16",
        reasons=("aiter 0.1.16 has no MXFP8 experts (no configs/model_configs/*mxfp8*tuned_fmoe*.csv)",),
        remedies=("build a newer ROCm/aiter from source (v0.1.19 or later; the packages on the index are too old)",),
    ),
    "0.1.16.post2": Case(aiter="v0.1.16.post2"),
    "0.1.19": Case(aiter="v0.1.19"),
    "0.1.20.post1": Case(aiter="v0.1.20.post1"),
    # versions of FlyDSL
    "no flydsl": Case(
        flydsl=None,
        reasons=("flydsl is not installed, and AITER's MXFP8 kernels are written in it",),
        remedies=("pip install 'flydsl>=0.3.1,<0.4'",),
    ),
    "flydsl 0.3.4.1": Case(flydsl="0.3.4.1"),
    "flydsl 0.5.0": Case(
        flydsl="0.5.0",
        reasons=(
            "this aiter imports flydsl.utils.smem_allocator.SMEM_CAPACITY_MAP, which flydsl 0.5.0 does not have (it "
            "moved in 0.4)",
        ),
        remedies=("pip install 'flydsl>=0.3.1,<0.4'; or keep flydsl 0.5.0 and use moe_backend='flydsl'",),
    ),
    # gate functions
    "silu": Case(block(gate=GateFunction())),
    "silu with a limit": Case(block(gate=GateFunction(limit=10.0))),
    "another limit": Case(gate(limit=5.0)),
    "no limit": Case(gate(limit=None)),
    "alpha": Case(gate(alpha=1.7), reasons=(this_is("silu(alpha=1.7, limit=7, up_offset=1)"),)),
    "no offset": Case(gate(up_offset=0.0), reasons=(this_is("silu(alpha=1.702, limit=7)"),)),
    "limit after": Case(gate(limit_after=True), reasons=(this_is(str(replace(M3_GATE, limit_after=True))),)),
    "gelu": Case(block(gate=GateFunction("gelu_tanh")), reasons=(this_is("gelu_tanh"),)),
    "not gated": Case(block(gate=GateFunction("relu2", gated=False)), reasons=(this_is("relu2(gated=False)"),)),
    "another limit, built-in 7": Case(
        gate(limit=5.0),
        aiter="v0.1.16.post2",
        reasons=("this AITER has the limit 7 of Swiglu built in, this block has 5.0",),
        remedies=("build a newer ROCm/aiter (one with aiter.ops.flydsl.moe_kernels.runtime_swiglu_limit)",),
    ),
    "no limit, built-in 7": Case(
        gate(limit=None),
        aiter="v0.1.16.post2",
        reasons=("this AITER has the limit 7 of Swiglu built in, this block has None",),
        remedies=("build a newer ROCm/aiter (one with aiter.ops.flydsl.moe_kernels.runtime_swiglu_limit)",),
    ),
    # sizes
    "MiniMax-M3": Case(M3),
    "I 384": Case(block(intermediate_size=384)),
    "I 192": Case(
        block(intermediate_size=192),
        reasons=(wrong_intermediate(192),),
    ),
    "H 384": Case(block(hidden_size=384), reasons=("hidden size must be a multiple of 256, got 384",)),
    "k 255": Case(block(num_experts=256, top_k=255), reasons=("top-k must be 1 to 254, got 255",)),
    "4 GiB": Case(
        replace(M3, intermediate_size=6144),
        reasons=("the down weights of all experts must be below 4 GiB, got H6144 I6144 E128 k4",),
        remedies=("spread the experts over more GPUs",),
    ),
    # the rest of a block
    "expert map": Case(block(has_expert_map=True)),
    "fp8 weights": Case(block(weight_format="mxfp8")),
    "transposed": Case(block(transposed=True, gate_up_layout="interleaved", up_first=True)),
    "bias": Case(block(has_bias=True), reasons=("biases: AITER's tuned MXFP8 kernels drop them silently",)),
    "fp16": Case(block(activation_dtype=torch.float16, out_dtype=torch.float16)),
    "fp32": Case(
        block(activation_dtype=torch.float32, out_dtype=torch.float32),
        reasons=("hidden states must be bf16 or fp16, got float32", "results must be bf16 or fp16, got float32"),
    ),
    "activations mxfp8": Case(activations="mxfp8"),
    "activations bf16": Case(
        activations="bf16",
        reasons=("AITER's kernels round activations to MXFP8, and activations='bf16' forbids it",),
        remedies=("activations='auto'",),
    ),
    # all at once
    "everything wrong": Case(
        block(hidden_size=64, intermediate_size=96, has_bias=True, gate=GateFunction("gelu")),
        arch="gfx942",
        aiter=None,
        flydsl=None,
        reasons=(
            "needs gfx950 (MI350, MI355X), this is gfx942",
            "aiter is not installed (build ROCm/aiter from source)",
            "hidden size must be a multiple of 256, got 64",
            wrong_intermediate(96),
            this_is("gelu"),
            "biases: AITER's tuned MXFP8 kernels drop them silently",
        ),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_taken_or_refused_with_every_reason(name: str, detect: Detect) -> None:
    case = TABLE[name]
    capabilities, target = detect(case.aiter, case.flydsl), Target("cuda", case.arch)
    explicit = CompileOptions(moe_backend="aiter", activations=case.activations)
    auto = select_backend(CompileOptions(activations=case.activations), case.spec, target, capabilities, BACKENDS)
    if not case.reasons:
        selection = select_backend(explicit, case.spec, target, capabilities, BACKENDS)
        assert selection == auto
        assert (selection.backend, selection.rejected) == ("aiter", ())
        return
    with pytest.raises(BackendRefused) as caught:
        select_backend(explicit, case.spec, target, capabilities, BACKENDS)
    first, *lines, last = str(caught.value).splitlines()
    remedies = list(case.remedies) + [None] * (len(case.reasons) - len(case.remedies))
    wanted = [
        f"  - {reason}" + (f" ({remedy})" if remedy else "")
        for reason, remedy in zip(case.reasons, remedies, strict=True)
    ]
    assert lines == wanted
    assert first.startswith(f"moe_rocm: moe_backend='aiter' cannot run this expert block ({case.spec.sizes}")
    assert last == "Choose another moe_backend, or 'auto' for the first that can."
    assert auto.backend != "aiter"
    rejected = [r for r in auto.rejected if r.backend == "aiter"]
    assert [str(r) for r in rejected] == [line.replace("  - ", "aiter: ", 1) for line in wanted]


def test_no_environment_variable_of_aiter_decides(detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ROCM_USE_AITER", "SGLANG_USE_AITER", "AITER_ONLINE_TUNE"):
        monkeypatch.setenv(name, "0")
    assert select_backend(CompileOptions(), SMALL, GFX950, detect("HEAD", "0.3.1"), BACKENDS).backend == "aiter"


def test_a_missing_aiter_is_said_where_it_alone_is_missing(detect: Detect) -> None:
    capabilities = detect(None, "0.3.1")
    selection = select_backend(CompileOptions(), M3, GFX950, capabilities, BACKENDS)
    wanted = Rejection("aiter", "aiter is not installed (build ROCm/aiter from source)")
    assert missing_package(selection, capabilities) == wanted
    assert missing_package(Selection("triton", selection.rejected), detect("HEAD", "0.3.1")) is None


def test_a_machine_without_a_block_is_refused_for_what_it_lacks(detect: Detect) -> None:
    refuse_hopeless_choice(CompileOptions(moe_backend="aiter"), (GFX950,), detect("HEAD", "0.3.1"))
    options = CompileOptions(moe_backend="aiter", activations="bf16")
    with pytest.raises(BackendRefused, match="activations='bf16' forbids it"):
        refuse_hopeless_choice(options, (GFX950,), detect("HEAD", "0.3.1"))


class TestHazard:
    """Stage-1 builds that wait too weakly for their loads: taken, but not without a word."""

    @pytest.mark.parametrize("choice", ["auto", "aiter"])
    def test_of_an_affected_block(self, detect: Detect, choice: str) -> None:
        options = CompileOptions(moe_backend=choice)
        (caution, _) = select_backend(options, M3, GFX950, detect("HEAD", "0.3.1"), BACKENDS).cautions
        assert caution.backend == "aiter"
        assert caution.text.startswith("this block (H6144 I768 E128 k4) runs stage-1 kernels")
        assert "up to 16 tokens are safe" in caution.text
        assert caution.remedy == (
            "moe_backend='flydsl' or 'triton'; AITER's pull request 5561 appears to fix it, which cannot be told from "
            "here"
        )

    def test_of_others(self, detect: Detect) -> None:
        fused = replace(SMALL, num_experts=129, top_k=5)
        for spec in (SMALL, fused):
            cautions = select_backend(CompileOptions(), spec, GFX950, detect("HEAD", "0.3.1"), BACKENDS).cautions
            assert not any("wait too weakly" in caution.text for caution in cautions)
        # Where another backend runs, AITER's hazards are of no concern.
        assert select_backend(CompileOptions(), M3, GFX950, detect(None, None), BACKENDS).cautions == ()


class TestUntuned:
    def test_a_block_without_a_tuned_configuration(self, detect: Detect) -> None:
        (caution,) = select_backend(CompileOptions(), SMALL, GFX950, detect("HEAD", "0.3.1"), BACKENDS).cautions
        assert str(caution) == (
            "aiter: no tuned configuration for H256 I128 E8 k2, so heuristics choose its kernels (tuned for: "
            "H6144 I384 E129 k5, H6144 I768 E129 k5) (compare with moe_backend='flydsl' or 'triton')"
        )

    def test_a_tuned_block(self, detect: Detect) -> None:
        fused = replace(M3, num_experts=129, top_k=5)
        cautions = select_backend(CompileOptions(), fused, GFX950, detect("HEAD", "0.3.1"), BACKENDS).cautions
        assert not any("tuned" in caution.text for caution in cautions)


class TestAvailableBackends:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: GFX950))

    def pretend(self, monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities) -> None:
        monkeypatch.setattr(Capabilities, "detect", classmethod(lambda cls: capabilities))

    def test_usable(self, detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pretend(monkeypatch, detect("v0.1.20.post1", "0.3.1"))
        aiter = available_backends()[0]
        assert (aiter.name, aiter.usable) == ("aiter", True)
        assert aiter.versions == (("aiter", "0.1.20.post1"), ("flydsl", "0.3.1"))
        assert "hidden size 6144" in aiter.cautions[0].text
        assert [c.text[:22] for c in available_backends(SMALL)[0].cautions] == ["no tuned configuration"]

    def test_the_command_line_prints_all_of_it(self, detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pretend(monkeypatch, detect("HEAD", "0.5.0"))
        shown = CliRunner().invoke(app, ["backends", "--json"])
        aiter = json.loads(shown.stdout)["backends"][0]
        assert aiter["versions"] == {"aiter": "HEAD", "flydsl": "0.5.0"}
        assert aiter["rejections"] == [
            {"reason": TABLE["flydsl 0.5.0"].reasons[0], "remedy": TABLE["flydsl 0.5.0"].remedies[0]}
        ]
        assert aiter["cautions"] == []
        words = " ".join(CliRunner().invoke(app, ["backends"]).stdout.split())
        assert "flydsl 0.5.0" in words
        self.pretend(monkeypatch, detect("HEAD", "0.3.1"))
        words = " ".join(CliRunner().invoke(app, ["backends"]).stdout.split())
        assert "caution: aiter: blocks of hidden size 6144 (MiniMax-M3) run stage-1 kernels" in words
        assert "auto takes the first usable one that can run the block; on this machine: aiter" in words


def test_a_folder_without_the_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert aiter_package.find(import_it=True).problem == (
        "the installed 'aiter' is not AMD's (it has no aiter.fused_moe)"
    )
