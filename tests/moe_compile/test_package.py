"""The package as others see it: what an import costs, what is installed under which name, and what the README says."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

import moe_compile
from moe_compile.env import VARIABLES
from moe_compile.options import CompileOptions

ROOT = Path(__file__).parents[2]


def python(code: str, cwd: Path = ROOT) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


def test_the_public_names() -> None:
    assert set(moe_compile.__all__) == {
        "CompileReport",
        "LayerReport",
        "__version__",
        "accelerate",
        "available_backends",
        "explain",
        "refresh",
        "register_hf_experts",
        "reports",
    }
    for name in moe_compile.__all__:
        assert getattr(moe_compile, name) is not None


def test_no_submodule_hides_a_public_name() -> None:
    """Importing moe_compile.x sets the attribute x of the package, whatever it was before."""
    package = Path(moe_compile.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} | {"passes", "kernels"}
    assert not modules & set(moe_compile.__all__)


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ["triton", "transformers", "aiter", "flydsl", "rich", "typer", "depyf", "torch._inductor", "torch._dynamo"]
    code = f"import sys, moe_compile; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == "[]\n"


def test_the_backend_is_found_by_its_entry_point() -> None:
    found = {e.name: e.value for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    assert found["moe_rocm"] == "moe_compile.backend:moe_rocm"


def test_torch_lists_the_backend_without_an_import_of_ours() -> None:
    code = (
        "import sys, torch; names = torch.compiler.list_backends();"
        "print('moe_rocm' in names, any(m.startswith('moe_compile') for m in sys.modules))"
    )
    assert python(code) == "True False\n"


@pytest.mark.parametrize("name", ["kernels", "passes"])
def test_the_bare_name_does_not_find_our_folder(name: str) -> None:
    """Run from the repository's root. Another package of that name may be installed; ours it must not be."""
    code = f"import importlib.util; spec = importlib.util.find_spec('{name}'); print(spec and spec.origin)"
    assert str(ROOT) not in python(code)


def test_ruff_bans_the_bare_names() -> None:
    snippet = "import kernels\nfrom passes import fx_utils\nimport moe_compile.kernels\n"
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    run = subprocess.run(
        [*command, "--stdin-filename", "snippet.py", "-"], cwd=ROOT, input=snippet, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stderr
    assert re.findall(r"snippet.py:(\d+):\d+: (TID251) `(\w+)` is banned", run.stdout) == [
        ("1", "TID251", "kernels"),
        ("2", "TID251", "passes"),
    ]


def test_the_wheel_holds_everything_under_one_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("moe_compile", "passes", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*command, "--wheel-dir", tmp_path, source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"moe_compile", f"moe_compile-{moe_compile.__version__}.dist-info"}
    expected = {
        f"moe_compile/{path.relative_to(source / 'moe_compile')}" for path in source.glob("moe_compile/**/*.py")
    }
    expected |= {f"moe_compile/{path.relative_to(source)}" for path in source.glob("passes/**/*.py")}
    expected |= {f"moe_compile/{path.relative_to(source)}" for path in source.glob("kernels/**/*.py")}
    assert expected | {"moe_compile/py.typed"} == {name for name in names if name.startswith("moe_compile/")}


class TestEveryOption:
    def test_is_documented_in_its_field(self) -> None:
        for field in fields(CompileOptions):
            assert field.metadata.get("doc"), field.name

    def test_has_an_environment_variable(self) -> None:
        described = {variable.name.lower(): variable.description for variable in VARIABLES}
        for field in fields(CompileOptions):
            assert f"the option {field.name}" in described[field.name]

    def test_has_a_line_in_the_readme_with_its_default(self) -> None:
        rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| [^|]+ \|$", (ROOT / "README.md").read_text(), re.M)
        assert rows == [(field.name, str(field.default)) for field in fields(CompileOptions)]


def test_the_readme_names_every_backend_and_what_it_can_do_in_this_version() -> None:
    from moe_compile.kernels.ops import KERNELS
    from moe_compile.selection import AUTO_ORDER

    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.M))
    assert rows.keys() == {"auto", *AUTO_ORDER}
    for name in AUTO_ORDER:
        assert rows[name].startswith("**not in this version.**") is (name not in KERNELS), name


def test_every_constraint_is_exact() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line


def test_every_dependency_is_constrained() -> None:
    constrained = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    normal = {name.replace("_", "-") for name in constrained}
    for requirement in importlib.metadata.requires("moe_compile") or []:
        if 'extra == "flydsl"' not in requirement:
            name = re.match(r"[\w-]+", requirement)
            assert name is not None
            assert name[0].lower().replace("_", "-") in normal, requirement
