import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiter_stand_in
import pytest
import torch

from moe_compile.target import Capabilities, Package, Target


@pytest.mark.parametrize(
    ("arch", "is_amd", "sm_version", "block_scaled"),
    [
        ("gfx950", True, None, True),
        ("gfx942", True, None, False),
        ("sm_80", False, 80, False),
        ("sm_90", False, 90, False),
        ("sm_100", False, 100, True),
        ("sm_120", False, 120, True),
        ("cpu", False, None, False),
    ],
)
def test_what_an_architecture_can_do(arch: str, is_amd: bool, sm_version: int | None, block_scaled: bool) -> None:
    target = Target("cpu" if arch == "cpu" else "cuda", arch)
    assert (target.is_amd, target.sm_version, target.has_block_scaled_mma) == (is_amd, sm_version, block_scaled)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_a_device_without_architecture_is_its_type(name: str) -> None:
    assert Target.of(torch.device(name)) == Target(name, name)


@pytest.mark.parametrize(
    ("hip", "properties", "arch"),
    [
        ("7.0", {"gcnArchName": "gfx950:sramecc+:xnack-"}, "gfx950"),
        ("7.0", {"gcnArchName": "gfx942"}, "gfx942"),
        (None, {"major": 9, "minor": 0}, "sm_90"),
        (None, {"major": 10, "minor": 0}, "sm_100"),
        (None, {"major": 8, "minor": 6}, "sm_86"),
    ],
)
def test_a_gpu_is_asked_for_its_architecture(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, properties: dict[str, object], arch: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert Target.of(torch.device("cuda:0")) == Target("cuda", arch)


@pytest.mark.gpu
def test_the_architecture_of_this_gpu() -> None:
    target = Target.of(torch.device("cuda"))
    major, minor = torch.cuda.get_device_capability()
    assert target.is_amd or target.sm_version == 10 * major + minor


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of sys.path in which to pretend that a package is installed."""
    monkeypatch.delitem(sys.modules, "flydsl", raising=False)  # it would be found before anything in the folder
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, package: str, distribution: str | None = None, files: tuple[str, ...] = ()) -> None:
    (site / package).mkdir()
    for file in ("__init__.py", *files):
        (site / package / file).write_text("raise ImportError('Capabilities.detect must not import this')\n")
    if distribution:
        info = site / f"{distribution.replace('-', '_')}-9.8.7.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.8.7\n")


class TestDetect:
    def test_aiter_from_the_package_index_is_told_apart(self, site: Path) -> None:
        install(site, "aiter", "aiter")
        found = Capabilities.detect().aiter
        assert not found.usable
        assert found.problem == "the installed 'aiter' is not AMD's (it has no aiter.fused_moe)"

    def test_amds_aiter(self, site: Path) -> None:
        aiter_stand_in.install(site, "v0.1.19")
        found = Capabilities.detect().aiter
        assert (found.version, found.problem) == ("0.1.19", None)
        assert found.features[0] == "runtime_swiglu_limit"
        assert "aiter" not in sys.modules

    @pytest.mark.parametrize(("arch", "imported"), [("gfx950", True), ("gfx942", False)])
    def test_aiter_is_imported_where_it_could_run(
        self, site: Path, monkeypatch: pytest.MonkeyPatch, arch: str, imported: bool
    ) -> None:
        asked = []
        monkeypatch.setattr("moe_compile.aiter_package.find", lambda *, import_it: asked.append(import_it) or Package())
        monkeypatch.setattr(torch.version, "hip", "7.2")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
        Capabilities.detect()
        assert asked == [imported]

    def test_a_module_that_is_no_package_is_not_aiter(self, site: Path) -> None:
        (site / "aiter.py").write_text("")
        assert not Capabilities.detect().aiter.usable

    def test_flydsl(self, site: Path) -> None:
        install(site, "flydsl", "flydsl")
        assert Capabilities.detect().flydsl == Package(version="9.8.7")
        assert Capabilities.detect().versions()["flydsl"] == "9.8.7"

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("triton", "triton is not installed (pip install 'triton>=3.6')"),
            ("flydsl", "flydsl is not installed (pip install flydsl)"),
            ("aiter", "aiter is not installed (build ROCm/aiter from source)"),
        ],
    )
    def test_a_missing_package_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        found = getattr(Capabilities.detect(), name)
        assert found == Package(version=None, problem=problem)
        assert not found.usable
        assert Capabilities.detect().versions()[name] is None

    @pytest.mark.parametrize(("value", "interpreted"), [("1", True), ("0", False), (None, False)])
    def test_the_interpreter(self, monkeypatch: pytest.MonkeyPatch, value: str | None, interpreted: bool) -> None:
        if value is None:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        else:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        assert Capabilities.detect().triton_interpreted is interpreted

    def test_nothing_is_imported_by_looking(self) -> None:
        code = (
            "import sys; from moe_compile.target import Capabilities; Capabilities.detect();"
            "print(sorted({'triton', 'aiter', 'flydsl'} & set(sys.modules)))"
        )
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[]"


def test_kernel_packages_count_as_missing_until_looked_for() -> None:
    assert not Capabilities().aiter.usable
    assert not Capabilities().flydsl.usable
