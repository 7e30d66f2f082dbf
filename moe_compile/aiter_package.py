"""AMD's AITER as it is installed here, judged by what is in it and not by its version.

Everything but the last check reads files and imports nothing: importing AITER takes seconds, may compile, and fails on
a machine without an AMD GPU. Where there is a GPU for it, the import is tried as well, and its own error is the reason.
"""

from __future__ import annotations

import ast
import csv
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from moe_compile.packages import Package, version_of

# What we pass to aiter.fused_moe.fused_moe. Most of these are in every release; the last two came with v0.1.14.
ARGUMENTS = (
    "hidden_states",
    "w1",
    "w2",
    "topk_weight",
    "topk_ids",
    "expert_mask",
    "activation",
    "quant_type",
    "doweight_stage1",
    "w1_scale",
    "w2_scale",
    "dtype",
    "swiglu_limit",
    "gate_mode",
)
RUNTIME_LIMIT = "runtime_swiglu_limit"  # the limit of the gate function reaches the kernels; else 7 is built in
KERNELS = "aiter.ops.flydsl.moe_kernels"
TUNED = "tuned for "  # and a shape as ``ExpertSpec.sizes`` writes it
_TUNED_FILES = "*mxfp8*tuned_fmoe*.csv"

_NOT_INSTALLED = "aiter is not installed (build ROCm/aiter from source)"
_UPDATE = "build a newer ROCm/aiter from source (v0.1.19 or later; the packages on the index are too old)"
_FLYDSL = "pip install 'flydsl>=0.3.1,<0.4'"
_MOVED = ("flydsl.utils.smem_allocator", "SMEM_CAPACITY_MAP")


def find(*, import_it: bool) -> Package:
    """Every problem, one after the other; a usable package if there is none.

    Args:
        import_it: also import the kernels, as a machine that is to run them must.
    """
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return Package(problem=_NOT_INSTALLED)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    folder = next((folder for folder in folders if (folder / "fused_moe.py").exists()), None)
    if folder is None:
        return Package(
            problem="the installed 'aiter' is not AMD's (it has no aiter.fused_moe)",
            remedy="pip uninstall aiter, and build ROCm/aiter from source",
        )
    version = version_of("amd-aiter")
    problems = _problems_of_aiter(folder, version)
    problems += _problems_of_flydsl(folder)
    if import_it and not problems:
        problems = _problems_of_import()
    return Package(
        version=version,
        problem="; ".join(what for what, _ in problems) or None,
        remedy="; ".join(dict.fromkeys(remedy for _, remedy in problems)) or None,
        features=(*_limit_features(folder), *_tuned_features(folder)),
    )


def _limit_features(folder: Path) -> tuple[str, ...]:
    return (RUNTIME_LIMIT,) if _defines(folder / "ops" / "flydsl" / "moe_kernels.py", RUNTIME_LIMIT) else ()


def _tuned_features(folder: Path) -> tuple[str, ...]:
    files = sorted((folder / "configs" / "model_configs").glob(_TUNED_FILES))
    return tuple(sorted(TUNED + shape for path in files for shape in _shapes(path, path.stat().st_mtime_ns)))


def _problems_of_aiter(folder: Path, version: str) -> list[tuple[str, str]]:
    problems = []
    entry = folder / "fused_moe.py"
    parameters = _parameters(entry, entry.stat().st_mtime_ns)
    if parameters is None:
        problems.append((f"aiter {version} has no function aiter.fused_moe.fused_moe", _UPDATE))
    else:
        missing = [name for name in ARGUMENTS if name not in parameters]
        if missing:
            problems.append((f"fused_moe of aiter {version} has no parameter {', '.join(missing)}", _UPDATE))
    if not (folder / "ops" / "flydsl" / "moe_kernels.py").exists():
        problems.append((f"aiter {version} has no FlyDSL kernels ({KERNELS})", _UPDATE))
    # No symbol tells the MXFP8 route apart; the tuned configurations came with it.
    if not any((folder / "configs" / "model_configs").glob(_TUNED_FILES)):
        problems.append((f"aiter {version} has no MXFP8 experts (no configs/model_configs/{_TUNED_FILES})", _UPDATE))
    return problems


def _problems_of_flydsl(folder: Path) -> list[tuple[str, str]]:
    spec = importlib.util.find_spec("flydsl")
    if spec is None:
        return [("flydsl is not installed, and AITER's MXFP8 kernels are written in it", _FLYDSL)]
    version = version_of("flydsl")
    problems = []
    wanted = _declared_flydsl()
    if wanted is not None and version != "unknown" and _numbers(version) < _numbers(wanted):
        problems.append((f"flydsl {version} is older than {wanted}, which this aiter asks for", _FLYDSL))
    module, name = _MOVED
    allocators = [Path(root, "utils", "smem_allocator.py") for root in spec.submodule_search_locations or ()]
    if _imports(folder / "ops" / "flydsl", module, name) and not any(_defines(path, name) for path in allocators):
        problems.append(
            (
                f"this aiter imports {module}.{name}, which flydsl {version} does not have (it moved in 0.4)",
                f"{_FLYDSL}; or keep flydsl {version} and use moe_backend='flydsl'",
            )
        )
    return problems


def _problems_of_import() -> list[tuple[str, str]]:
    try:
        importlib.import_module("aiter.fused_moe")
        importlib.import_module(KERNELS)
        aiter = importlib.import_module("aiter")
        for enum, member in (("ActivationType", "Swiglu"), ("ActivationType", "Silu"), ("QuantType", "per_1x32")):
            getattr(getattr(aiter, enum), member)
    except Exception as error:  # a foreign package that builds and loads things on import: whatever it raises is said
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return [(f"importing {KERNELS} failed: {text}", f"{_FLYDSL}, or rebuild ROCm/aiter for this machine")]
    return []


@functools.lru_cache(maxsize=64)
def _parameters(path: Path, modified: int) -> frozenset[str] | None:
    """Those of the function ``fused_moe`` in a file, None if it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "fused_moe":
            arguments = node.args
            return frozenset(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    return None


def _defines(path: Path, name: str) -> bool:
    return path.exists() and name in _top_level_names(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _top_level_names(path: Path, modified: int) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


@functools.lru_cache(maxsize=16)
def _imports(folder: Path, module: str, name: str) -> bool:
    """Whether a file under ``folder`` has ``from module import name``, with nothing to catch its failure."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if name in text and _has_bare_import(ast.parse(text), module, name):
            return True
    return False


def _has_bare_import(node: ast.AST, module: str, name: str) -> bool:
    if isinstance(node, ast.Try):
        return False
    if isinstance(node, ast.ImportFrom) and node.module == module and name in {alias.name for alias in node.names}:
        return True
    return any(_has_bare_import(child, module, name) for child in ast.iter_child_nodes(node))


@functools.lru_cache(maxsize=16)
def _shapes(path: Path, modified: int) -> frozenset[str]:
    """The blocks that a file of tuned configurations is for."""
    with path.open(encoding="utf-8", newline="") as file:
        return frozenset(
            f"H{row['model_dim']} I{row['inter_dim']} E{row['expert']} k{row['topk']}"
            for row in csv.DictReader(file)
            if all(row.get(name) for name in ("model_dim", "inter_dim", "expert", "topk"))
        )


def _declared_flydsl() -> str | None:
    """The version of flydsl that AITER's own metadata asks for."""
    try:
        requirements = importlib.metadata.requires("amd-aiter") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    matches = (re.match(r"flydsl\s*(?:==|>=|~=)\s*([\d.]+)", requirement) for requirement in requirements)
    return next((match.group(1) for match in matches if match), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:4])
