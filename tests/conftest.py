"""What every test gets: no leftovers of another test, a private compile cache, and skips that say what is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from moe_compile import report
from moe_compile.env import PREFIX


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason="needs a CUDA or ROCm GPU")))
    if importlib.util.find_spec("transformers") is None:
        skips.append(("hf", pytest.mark.skip(reason="needs transformers (pip install moe_compile[hf])")))
    for item in items:
        for marker, skip in skips:
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def private_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's on-disk caches start empty and are nobody else's; subprocesses inherit the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ``MOE_COMPILE_*`` variable of the caller's shell, no report and no compiled code of another test."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    report.clear()
    torch.compiler.reset()
    yield
    report.clear()
    torch.compiler.reset()
