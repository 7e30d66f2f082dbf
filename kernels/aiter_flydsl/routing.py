"""Routing as AITER may be given it: no id that its kernels would follow out of bounds, and none twice in a row.

AITER's sort indexes tables by the ids without a check, ignores int64 ids without a word, and needs the ids of a token
to be distinct. So ids that name no expert here, and repeated ones, become the fake expert of the mask, and one slot
more with the fake expert is appended: with a mask, AITER counts one slot less when it looks for a tuned configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_compile.kernels.expert_parallel import ExpertMap, ExpertMask

if TYPE_CHECKING:
    from moe_compile.kernels.triton.launch import Launch


def routing(
    topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, mask: ExpertMask
) -> tuple[Tensor, Tensor]:
    """Reads nothing on the host.

    Args:
        topk_ids: (T, K) int32 or int64, any values; global ids if there is an ``expert_map``.
        topk_weights: (T, K), any float dtype.
        expert_map: (E_global,) global to local ids, -1 for absent.
        mask: of the experts in the weights, all ones and the fake expert.

    Returns:
        ids (T, K + 1) int32 in [0, fake_id], distinct in a row but for the fake one, and weights (T, K + 1) float32,
        zero for the fake one. The weights of a repeated id are added up at its first occurrence.
    """
    if topk_ids.device.type == "cuda":
        from moe_compile.kernels.triton.launch import execute

        result, launch = launch_routing(topk_ids, topk_weights, expert_map, mask)
        execute([launch], topk_ids.device)
        return result
    return torch_routing(topk_ids, topk_weights, expert_map, mask)


def torch_routing(
    topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, mask: ExpertMask
) -> tuple[Tensor, Tensor]:
    """`routing` with torch operators."""
    local = topk_ids if expert_map is None else ExpertMap(expert_map).local_ids(topk_ids)
    here = (local >= 0) & (local < mask.num_global)
    local = torch.where(here, local, mask.fake_id).int()
    weights = topk_weights.float()
    same = local.unsqueeze(-1) == local.unsqueeze(-2)  # (T, K, K)
    total = torch.where(same, weights.unsqueeze(-2), 0).sum(-1)
    kept = here & ~same.tril(-1).any(-1)
    ids = torch.where(kept, local, mask.fake_id)
    return (
        torch.nn.functional.pad(ids, (0, 1), value=mask.fake_id),
        torch.nn.functional.pad(torch.where(kept, total, 0), (0, 1)),
    )


def launch_routing(
    topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, mask: ExpertMask
) -> tuple[tuple[Tensor, Tensor], Launch]:
    """The result of `routing`, and the one launch that writes it."""
    from moe_compile.kernels.aiter_flydsl.routing_kernels import routing_kernel
    from moe_compile.kernels.triton.launch import Launch

    tokens, top_k = topk_ids.shape
    shape = (tokens, top_k + 1)
    ids = torch.empty(shape, dtype=torch.int32, device=topk_ids.device)
    weights = torch.empty(shape, dtype=torch.float32, device=topk_ids.device)
    columns = 1 << top_k.bit_length()
    block = max(1, min(64, 1024 // columns))
    arguments = {
        "ids_ptr": topk_ids.contiguous(),
        "weights_ptr": topk_weights.contiguous(),
        "expert_map_ptr": None if expert_map is None else expert_map.contiguous(),
        "out_ids_ptr": ids,
        "out_weights_ptr": weights,
        "num_tokens": tokens,
        "NUM_EXPERTS": mask.num_global,
        "NUM_IDS": mask.num_global if expert_map is None else expert_map.shape[0],
        "TOP_K": top_k,
        "COLUMNS": columns,
        "BLOCK": block,
    }
    return (ids, weights), Launch(routing_kernel, (-(-tokens // block),), arguments)
