"""What is said about an installed AITER, by release and by version of FlyDSL, with real files and no AITER."""

from __future__ import annotations

import sys
from pathlib import Path

import aiter_stand_in
import pytest

from moe_compile import aiter_package
from moe_compile.packages import Package

UPDATE = "build a newer ROCm/aiter from source (v0.1.19 or later; the packages on the index are too old)"
FLYDSL = "pip install 'flydsl>=0.3.1,<0.4'"
TUNED = ("tuned for H6144 I384 E129 k5", "tuned for H6144 I768 E129 k5")
LIMIT = ("runtime_swiglu_limit", *TUNED)

TABLE: dict[tuple[str, str | None], Package] = {
    ("v0.1.13.post1", "0.3.1"): Package(
        "0.1.13.post1",
        "fused_moe of aiter 0.1.13.post1 has no parameter swiglu_limit, gate_mode; "
        "aiter 0.1.13.post1 has no MXFP8 experts (no configs/model_configs/*mxfp8*tuned_fmoe*.csv)",
        UPDATE,
    ),
    ("v0.1.16", "0.3.1"): Package(
        "0.1.16",
        "aiter 0.1.16 has no MXFP8 experts (no configs/model_configs/*mxfp8*tuned_fmoe*.csv)",
        UPDATE,
    ),
    ("v0.1.16.post2", "0.3.1"): Package("0.1.16.post2", features=TUNED),
    ("v0.1.18", "0.3.1"): Package("0.1.18", features=LIMIT),
    ("v0.1.19", "0.3.1"): Package("0.1.19", features=LIMIT),
    ("v0.1.20.post1", "0.3.4.1"): Package("0.1.20.post1", features=LIMIT),
    ("HEAD", "0.3.1"): Package("HEAD", features=LIMIT),
    ("HEAD", None): Package(
        "HEAD", "flydsl is not installed, and AITER's MXFP8 kernels are written in it", FLYDSL, LIMIT
    ),
    ("HEAD", "0.3.0"): Package("HEAD", "flydsl 0.3.0 is older than 0.3.1, which this aiter asks for", FLYDSL, LIMIT),
    **{
        ("HEAD", version): Package(
            "HEAD",
            "this aiter imports flydsl.utils.smem_allocator.SMEM_CAPACITY_MAP, which flydsl "
            f"{version} does not have (it moved in 0.4)",
            f"{FLYDSL}; or keep flydsl {version} and use moe_backend='flydsl'",
            LIMIT,
        )
        for version in ("0.4.0", "0.5.0")
    },
}


@pytest.mark.parametrize(("release", "flydsl"), TABLE)
def test_by_release_and_flydsl(tmp_path: Path, release: str, flydsl: str | None) -> None:
    with aiter_stand_in.importable(tmp_path, release, flydsl):
        found = aiter_package.find(import_it=False)
        assert not {"aiter", "flydsl"} & set(sys.modules)
        wanted = TABLE[release, flydsl]
        assert found == wanted
        # What the files say is what the import says.
        assert aiter_package.find(import_it=True) == wanted
        assert ("aiter" in sys.modules) is wanted.usable


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('no HIP:\\n  libamdhip64.so')", "ImportError: no HIP: libamdhip64.so"),
        ("raise Exception('ROCm version file not found')", "Exception: ROCm version file not found"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_import_that_fails_keeps_its_own_words(tmp_path: Path, text: str, said: str) -> None:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        (tmp_path / "aiter/ops/flydsl/moe_kernels.py").write_text(f"{text}\n")
        found = aiter_package.find(import_it=True)
    assert found.problem == f"importing aiter.ops.flydsl.moe_kernels failed: {said}"
    assert found.remedy == f"{FLYDSL}, or rebuild ROCm/aiter for this machine"


def test_enum_members_that_are_gone(tmp_path: Path) -> None:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        path = tmp_path / "aiter/__init__.py"
        path.write_text(path.read_text().replace("Swiglu", "Other"))
        problem = aiter_package.find(import_it=True).problem or ""
    assert "has no attribute 'Swiglu'" in problem


def test_an_aiter_that_knows_the_new_place_is_fine_with_a_new_flydsl(tmp_path: Path) -> None:
    with aiter_stand_in.importable(tmp_path, "HEAD", "0.5.0"):
        (tmp_path / "aiter/ops/flydsl/utils.py").write_text(
            "try:\n    from flydsl.utils.smem_allocator import SMEM_CAPACITY_MAP\n"
            "except ImportError:\n    SMEM_CAPACITY_MAP = {}\n"
        )
        assert aiter_package.find(import_it=True).usable


def test_the_index_package_of_the_same_name(tmp_path: Path) -> None:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        (tmp_path / "aiter/fused_moe.py").unlink()
        found = aiter_package.find(import_it=True)
    assert found.problem == "the installed 'aiter' is not AMD's (it has no aiter.fused_moe)"
    assert found.remedy == "pip uninstall aiter, and build ROCm/aiter from source"


def test_a_fused_moe_without_the_function_and_without_kernels(tmp_path: Path) -> None:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        (tmp_path / "aiter/fused_moe.py").write_text("")
        (tmp_path / "aiter/ops/flydsl/moe_kernels.py").unlink()
        found = aiter_package.find(import_it=False)
    assert found.problem == (
        "aiter HEAD has no function aiter.fused_moe.fused_moe; aiter HEAD has no FlyDSL kernels "
        "(aiter.ops.flydsl.moe_kernels)"
    )
    assert found.features == TUNED
