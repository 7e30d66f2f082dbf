"""Expert and tensor parallelism in real processes over gloo; tests/support/parallel_ranks.py has the checks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = Path(__file__).parents[1] / "support" / "parallel_ranks.py"

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: Path) -> None:
    changes = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(RANK.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    environment = {**os.environ, **changes}
    outputs = [tmp_path / f"rank{rank}.txt" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-P", RANK, str(rank), str(world), tmp_path / "store"]
            with output.open("wb") as file:
                ranks.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        # All at once: ranks that are left alone by one that failed would wait for it.
        deadline = time.monotonic() + 300
        while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks):
            assert time.monotonic() < deadline, "\n".join(output.read_text()[-4000:] for output in outputs)
            time.sleep(0.1)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    codes = [one.returncode for one in ranks]
    assert codes == [0] * world, "\n".join(output.read_text()[-4000:] for output in outputs)
