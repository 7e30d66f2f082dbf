"""An expert block whose every intermediate value can be replaced: the ways in which a block can be almost one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from expert_modules import Experts, Spelling, grouped_linear, random_inputs
from graph_capture import Captured, capture, check_rewrite, only_miss
from torch import Tensor

Hook = Callable[[Tensor, dict[str, Any]], Any]


class HookedExperts(Experts):
    """``hooks[name](value, earlier values)`` replaces the value ``name``; see ``forward`` for the names.

    Values: ids (S,), perm (S,), x (S, H), counted, counts (E,), offsets (E,), up_weight, gate_up (S, 2I), inner (S, I),
    down_weight, out (S, H), weights (S,), weighted (S, H), inverse (S,), unsorted (S, H), slots (T, K, H), sum (T, H).
    """

    def __init__(self, form: str = "grouped_mm", hooks: dict[str, Hook] | None = None, **sizes: Any) -> None:
        spelling = Spelling(form, bias=sizes.pop("bias", False), gate=sizes.pop("gate", "silu"))
        super().__init__(spelling, **{"dtype": torch.float32, **sizes})
        self.hooks = hooks or {}

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *others: Tensor) -> Any:
        values: dict[str, Any] = {
            "self": self,
            "hidden_states": hidden_states,
            "topk_ids": topk_ids,
            "topk_weights": topk_weights,
            "others": others,
        }

        def step(name: str, value: Any) -> Any:
            values[name] = self.hooks[name](value, values) if name in self.hooks else value
            return values[name]

        num_tokens, top_k = topk_ids.shape
        ids = step("ids", topk_ids.reshape(-1))
        if self.spelling.form == "grouped_mm":
            sorted_ids, perm = torch.sort(ids)
            sorted_ids, perm = step("sorted_ids", sorted_ids), step("perm", perm)
            x = step("x", hidden_states[perm // top_k])
            counted = step("counted", sorted_ids.float())
            counts = step("counts", torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1))
            offsets = step("offsets", torch.cumsum(counts, dim=0, dtype=torch.int32))

            def linear(x: Tensor, name: str, weight: Tensor) -> Tensor:
                return grouped_linear(x, step(name, weight), values.get(name + "_offsets", offsets), False)
        else:
            perm, sorted_ids = None, ids
            x = step("x", hidden_states.repeat_interleave(top_k, dim=0))

            def linear(x: Tensor, name: str, weight: Tensor) -> Tensor:
                chosen = step(name + "_gathered", step(name, weight)[step(name + "_ids", sorted_ids)])
                product = torch.bmm(chosen, x.unsqueeze(-1) if x.dim() == 2 else x)
                found: Tensor = step(name + "_product", product)
                return found.squeeze(-1)

        gate_up = step("gate_up", linear(x, "up_weight", self.gate_up_proj))
        if self.spelling.bias:
            gate_up = gate_up + step("up_bias", self.gate_up_proj_bias[sorted_ids])
        inner = step("inner", self.activate(gate_up))
        out = step("out", linear(inner, "down_weight", self.down_proj))
        if self.spelling.bias:
            out = out + step("down_bias", self.down_proj_bias[sorted_ids])
        routed = topk_weights.reshape(-1)
        routed = step("weights", routed if perm is None else routed[perm])
        out = step("weighted", out * routed.unsqueeze(-1))
        if perm is not None:
            inverse = torch.empty_like(perm)
            inverse[perm] = torch.arange(perm.size(0))
            out = step("unsorted", out[step("inverse", inverse)])
        out = step("slots", out.view(num_tokens, top_k, -1))
        return step("sum", out.sum(dim=1))


def capture_hooked(
    hooks: dict[str, Hook] | None = None,
    form: str = "grouped_mm",
    *,
    tokens: int = 6,
    top_k: int = 2,
    others: Sequence[Tensor] = (),
    dynamic: bool = False,
    decomposed: bool = False,
    **options: Any,
) -> Captured:
    module = HookedExperts(form, hooks, **options)
    inputs = [*random_inputs(module, tokens, top_k), *others]
    return capture(module, inputs, dynamic=(0, 1, 2) if dynamic else (), decomposed=decomposed)


def check_miss(reason: str, captured: Captured) -> None:
    """The block is left alone for a reason that says ``reason``, and the graph computes what it did."""
    miss = only_miss(check_rewrite(captured))
    assert reason in miss.reason, miss.reason
