"""Runs interpreted/ in two child processes, the whole expert block and its parts, with TRITON_INTERPRET=1.

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
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
def test_under_the_interpreter(whole: bool) -> None:
    files = [str(path) for path in sorted(FOLDER.glob("test_*.py")) if (path.name == "test_experts.py") == whole]
    assert files
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        command, cwd=ROOT, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    print(child.stdout, child.stderr)  # one line per case; pytest shows it for a failure, and with -rA
    assert child.returncode == 0, f"{child.stdout.splitlines()[-1:]}, see the captured output"
