"""Random spellings of a loop over experts are found; random changes of one are refused, or change nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expert_loops import E, H, Step, capture_loop
from graph_capture import check_rewrite, only_match
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_compile.passes.find_experts import MoEMatch

# An example takes most of a second: none is spent on shrinking a failure.
QUICK: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow],
}

# Spellings of nothing at all, by the place in the loop.
HARMLESS: dict[str, list[Step]] = {
    "inputs": [lambda e, v: v, lambda e, v: v.clone()],
    "factors": [
        lambda e, v: v,
        lambda e, v: v.clone(),
        lambda e, v: v.squeeze(-1).unsqueeze(-1),
        lambda e, v: v[:, 0, None],
    ],
    "result": [lambda e, v: v, lambda e, v: v.double().float(), lambda e, v: v.clone()],
    "activation": [
        lambda e, g, u: F.silu(g) * u,
        lambda e, g, u: u * (g * torch.sigmoid(g)),
        lambda e, g, u: u * g / (1 + torch.exp(-g)),
    ],
    "add": [
        lambda out, token, rows: out.index_add(0, token, rows),
        lambda out, token, rows: out.index_put((token,), rows, accumulate=True),
    ],
}  # fmt: skip
# Changes of one expert (or, if ``only`` is None, of all), most of which compute something else.
MUTATIONS: dict[str, list[Any]] = {
    "id_of": [lambda e, v: (v + 1) % E, lambda e, v: 0],
    "up_of": [lambda e, v: (v + 1) % E, lambda e, v: E - 1 - v],
    "down_of": [lambda e, v: (v + 1) % E, lambda e, v: v // 2],
    "inputs": [lambda e, v: v.flip(0), lambda e, v: v * 2, lambda e, v: v.view(-1, H // 2, 2).mT.reshape(-1, H)],
    "token": [lambda e, v: v.flip(0), lambda e, v: (v + 1) % 6, lambda e, v: v.sort()[0]],
    "slots": [lambda e, v: 1 - v, lambda e, v: v * 0],
    "factors": [lambda e, v: v * v, lambda e, v: v.flip(0), lambda e, v: v + 1, lambda e, v: v.relu()],
    "result": [lambda e, v: v * 2, lambda e, v: v.flip(0), lambda e, v: -v],
    "activation": [
        lambda e, g, u: F.silu(u) * g,
        lambda e, g, u: F.gelu(g) * u,
        lambda e, g, u: F.silu(g) * u * 2,
    ],
    "experts": [[0, 1, 2], [0, 1, 2, 3, 0], [0, 0, 2, 3], [3, 2, 1, 0]],
}


def _harmless(data: st.DataObject) -> dict[str, Any]:
    steps: dict[str, Any] = {place: data.draw(st.sampled_from(choices)) for place, choices in HARMLESS.items()}
    steps["experts"] = data.draw(st.permutations(range(E)))
    return steps


def _only(expert: int | None, change: Step, otherwise: Step) -> Step:
    return lambda e, *values: (change if expert in (None, e) else otherwise)(e, *values)


def _arguments(data: st.DataObject) -> dict[str, Any]:
    return {
        "form": data.draw(st.sampled_from(["gathered", "dense"])),
        "decomposed": data.draw(st.booleans()),
        "transposed": data.draw(st.booleans()),
    }


@settings(max_examples=8, **QUICK)
@given(st.data())
def test_any_spelling_is_found(data: st.DataObject) -> None:
    only_match(check_rewrite(capture_loop(**_arguments(data), **_harmless(data))))


@settings(max_examples=10, **QUICK)
@given(st.data())
def test_a_changed_loop_is_never_rewritten_wrongly(data: st.DataObject) -> None:
    steps = _harmless(data)
    place = data.draw(st.sampled_from(sorted(MUTATIONS)))
    change = data.draw(st.sampled_from(MUTATIONS[place]))
    if place != "experts":
        plain = steps.get(place, lambda e, v: v)
        change = _only(data.draw(st.sampled_from([None, 0, E - 1])), change, plain)
    # Holds what was rewritten against the changed original.
    found = check_rewrite(capture_loop(**_arguments(data), **{**steps, place: change}))
    assert sum(isinstance(one, MoEMatch) for one in found) <= 1
