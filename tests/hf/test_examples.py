"""Every example runs as it stands, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.hf

LAST_LINE = {
    "compile_hf_model.py": "rewritten: 2 of 2 expert blocks",
    "generate_static_cache.py": "rewritten: 2 expert blocks in 1 graphs (0 graphs from the compile cache)",
    "parallel_decode.py": "ep on 1 ranks: the same logits",
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == LAST_LINE.keys()


@pytest.mark.parametrize("name", LAST_LINE)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # of its own: the second example compiles the first's graphs
    run = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == LAST_LINE[name]
    assert any("model.layers.1.mlp.experts" in line for line in lines)
