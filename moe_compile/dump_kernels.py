"""Sources and assembly of this package's Triton kernels, as a GPU of this process ran them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = "moe_compile.kernels.triton."


def write_kernels(folder: Path) -> None:
    """Fill ``kernels/``: ``NAME.py``, and for each compiled variant ``NAME.0.ttir``, ``NAME.0.ptx`` and so on.

    Does nothing where no GPU ran a kernel. Binaries are left out.
    """
    for name, function in _kernels():
        caches = [entry[0] for entry in function.device_caches.values()]
        variants = sorted(
            (kernel for cache in caches for kernel in cache.values()), key=lambda kernel: str(kernel.hash)
        )
        if not variants:
            continue
        (folder / "kernels").mkdir(exist_ok=True)
        (folder / "kernels" / f"{name}.py").write_text(function.src)
        for number, kernel in enumerate(variants):
            for extension, text in kernel.asm.items():
                if isinstance(text, str):
                    (folder / "kernels" / f"{name}.{number}.{extension}").write_text(text)


def _kernels() -> Iterator[tuple[str, Any]]:
    """Every compiled ``@triton.jit`` function of the kernels that were imported, by name; none when interpreted."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_PACKAGE):
            for name, value in vars(module).items():
                if hasattr(value, "device_caches") and getattr(value, "__module__", "").startswith(_PACKAGE):
                    found[name] = value
    yield from sorted(found.items())
