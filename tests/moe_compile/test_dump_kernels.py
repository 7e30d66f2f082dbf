"""The kernels' files, from a compiled kernel's place in Triton's own cache (a GPU fills it)."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_compile.dump_kernels import write_kernels


@dataclass
class Compiled:
    """What is read of triton.compiler.CompiledKernel."""

    hash: str
    asm: dict[str, Any]


def test_nothing_where_no_gpu_ran_a_kernel(tmp_path: Path) -> None:
    importlib.import_module("moe_compile.kernels.triton.decode")
    write_kernels(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_source_and_assembly_in_a_stable_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("moe_compile.kernels.triton.gate")
    name, kernel = next((n, v) for n, v in vars(module).items() if hasattr(v, "device_caches"))
    variants = [Compiled("b", {"ptx": "second", "cubin": b"\0"}), Compiled("a", {"ptx": "first", "ttir": "module {}"})]
    monkeypatch.setitem(kernel.device_caches, 0, (dict(enumerate(variants)), {}, None, None, None))
    write_kernels(tmp_path)
    found = {path.name: path.read_text() for path in (tmp_path / "kernels").iterdir()}
    assert f"def {name}(" in found.pop(f"{name}.py")
    assert found == {f"{name}.0.ptx": "first", f"{name}.0.ttir": "module {}", f"{name}.1.ptx": "second"}
