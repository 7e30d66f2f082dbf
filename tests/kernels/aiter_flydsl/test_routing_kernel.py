"""The routing kernel compiled for gfx950; its values are tested in ../triton/interpreted/test_aiter_routing.py."""

from __future__ import annotations

import os

import pytest
import torch

from moe_compile.kernels.aiter_flydsl.routing import launch_routing
from moe_compile.kernels.expert_parallel import ExpertMap, mask_of
from moe_compile.kernels.triton.aot import compile_launch


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled"
)
@pytest.mark.gfx950
@pytest.mark.parametrize("top_k", [4, 254])
@pytest.mark.parametrize("with_map", [False, True])
def test_compiles_for_gfx950_without_scratch(top_k: int, with_map: bool) -> None:
    mask = mask_of(ExpertMap.identity(128))
    expert_map = torch.empty(512, dtype=torch.int32, device="meta") if with_map else None
    ids = torch.empty(64, top_k, dtype=torch.int64, device="meta")
    _, launch = launch_routing(ids, torch.empty(64, top_k, device="meta"), expert_map, mask)
    assert compile_launch(launch, "gfx950").scratch == 0
