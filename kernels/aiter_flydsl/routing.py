"""Routing as AITER may be given it: no id that its kernels would follow out of bounds, and none twice in a row.

AITER's sort indexes tables by the ids without a check, ignores int64 ids without a word, and needs the ids of a token
to be distinct. So ids that name no expert here, and repeated ones, become the fake expert of the mask, and one slot
more with the fake expert is appended: with a mask, AITER counts one slot less when it looks for a tuned configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compile.kernels.expert_parallel import ExpertMap, ExpertMask


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
