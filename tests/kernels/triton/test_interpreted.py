"""Runs interpreted/ in child processes, one per file, with TRITON_INTERPRET=1.

The variable cannot be set in this process: `triton.jit` reads it when it decorates, Triton decorates its own library
(`tl.sum`, `tl.cumsum`) when it is imported, and Inductor may have imported it by then. Interpreted functions would also
be what Inductor's and the ahead-of-time tests of this process get. To work on one file:
``TRITON_INTERPRET=1 python -P -m pytest tests/kernels/triton/interpreted/test_gate.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: interpreted/ runs here")
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_under_the_interpreter(file: str) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", str(FOLDER / file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        command, cwd=ROOT, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    print(child.stdout, child.stderr)  # one line per case; pytest shows it for a failure, and with -rA
    assert child.returncode == 0, f"{file}: {child.stdout.splitlines()[-1:]}, see the captured output"
