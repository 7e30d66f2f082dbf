"""The linker that FlyDSL looks for in a ROCm installation, made from the one inside Triton."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

# FlyDSL calls `ld.lld -shared IN -o OUT`.
_SCRIPT = """#!{python}
import sys
from triton._C.libtriton import amd

arguments = sys.argv[1:]
if arguments[:1] != ["-shared"] or len(arguments) != 4 or arguments[2] != "-o":
    sys.exit(f"ld.lld: this stand-in links with -shared IN -o OUT, got {{arguments}}")
amd.link_hsaco(arguments[1], arguments[3])
"""


def write_rocm_path(folder: Path) -> Path:
    """Make ``folder`` serve FlyDSL as ROCM_PATH where ROCm is not installed; returns the linker in it."""
    linker = folder / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text(_SCRIPT.format(python=sys.executable))
    linker.chmod(linker.stat().st_mode | stat.S_IXUSR)
    return linker
