"""The routing kernel of the aiter backend against its torch form; it is a Triton kernel, so it is tested here."""

from __future__ import annotations

import pytest
import torch

from moe_compile.kernels.aiter_flydsl.routing import launch_routing, torch_routing
from moe_compile.kernels.expert_parallel import ExpertMap, mask_of
from moe_compile.kernels.triton.launch import execute

E = 6


@pytest.mark.parametrize("expert_map", [None, [-1, 0, 1, -1, 2, 3, 4, 5], [5, 4, -1, 3, 2, -1, 1, 0], [0, 9, -7, 1]])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (2, 3), (17, 4), (70, 8)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_torch_form(tokens: int, top_k: int, dtype: torch.dtype, expert_map: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(tokens)
    # Repeated ids and ids out of range on either side, the far ends included.
    ids = torch.randint(-2, E + 3, (tokens, top_k), generator=generator).to(dtype)
    ids[0, 0] = torch.iinfo(dtype).max
    weights = torch.rand(tokens, top_k, generator=generator).to(torch.bfloat16 if tokens == 17 else torch.float32)
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    mask = mask_of(ExpertMap.identity(E))
    (got_ids, got_weights), launch = launch_routing(ids, weights, table, mask)
    got_ids.fill_(-99)
    got_weights.fill_(torch.nan)
    execute([launch], ids.device)
    wanted_ids, wanted_weights = torch_routing(ids, weights, table, mask)
    assert torch.equal(got_ids, wanted_ids)
    torch.testing.assert_close(got_weights, wanted_weights, rtol=1e-6, atol=0)
