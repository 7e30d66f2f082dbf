"""Every spelling of an expert block is found, its specification is right, and the rewritten graph computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import GATES, UNGATED, Experts, Spelling, random_inputs
from graph_capture import Captured, capture, check_rewrite, only_match, only_miss
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_compile.passes.find_experts import MoEMatch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@st.composite
def spellings(draw: Any) -> Spelling:
    gated = draw(st.booleans())
    return Spelling(
        form=draw(st.sampled_from(["grouped_mm", "batched_mm"])),
        gate=draw(st.sampled_from(sorted(GATES if gated else UNGATED))),
        gated=gated,
        interleaved=gated and draw(st.booleans()),
        up_first=gated and draw(st.booleans()),
        transposed=draw(st.booleans()),
        bias=draw(st.booleans()),
        masks=draw(st.sampled_from(["none", "5.17", "5.24"])),
        sort=draw(st.sampled_from(["sort", "sort_stable", "argsort", "argsort_stable"])),
        gather=draw(st.sampled_from(["index", "index_select"])),
        tokens=draw(st.sampled_from(["divide", "repeat_interleave", "expand"])),
        inverse=draw(st.sampled_from(["index_put", "scatter", "argsort"])),
        weighting=draw(st.sampled_from(["before", "after"])),
        reduction=draw(st.sampled_from(["sum", "keepdim", "index_add", "scatter_add", "index_put"])),
        cast_weights=draw(st.booleans()),
    )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data(), spelling=spellings(), dtype=st.sampled_from(sorted(DTYPES, key=str)))
def test_every_spelling_is_found_and_computes_the_same(
    data: st.DataObject, spelling: Spelling, dtype: torch.dtype
) -> None:
    tokens, top_k = data.draw(st.integers(1, 9), label="T"), data.draw(st.integers(1, 3), label="K")
    experts = data.draw(st.integers(1, 5), label="E")
    # Multiples of 8: what grouped_mm takes. Equal sizes are drawn often.
    hidden, intermediate = (8 * data.draw(st.integers(1, 6), label=name) for name in ("H / 8", "I / 8"))
    routing_dtype = data.draw(st.sampled_from([torch.float32, dtype]), label="routing dtype")
    module = Experts(spelling, experts=experts, hidden=hidden, intermediate=intermediate, dtype=dtype)
    inputs = random_inputs(module, tokens, top_k, routing_dtype=routing_dtype, sentinels=spelling.masks != "none")
    captured = capture(
        module,
        list(inputs),
        decomposed=data.draw(st.booleans(), label="decomposed"),
        dynamic=(0, 1, 2) if tokens > 1 and data.draw(st.booleans(), label="dynamic T") else (),
    )
    if (spelling.form, spelling.masks) == ("batched_mm", "5.17"):  # clamped, not masked, and ids that may be anything
        assert "could not be shown" in only_miss(check_rewrite(captured)).reason
        return
    spec = only_match(check_rewrite(captured)).spec
    assert (spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.top_k) == (
        experts,
        hidden,
        intermediate,
        top_k,
    )
    assert spec.gate == module.gate
    assert spec.transposed == spelling.transposed
    assert spec.has_bias == spelling.bias
    assert spec.weight_format == DTYPES[dtype]
    assert (spec.activation_dtype, spec.out_dtype) == (dtype, dtype)
    assert spec.routing_dtype == (dtype if spelling.cast_weights else routing_dtype)
    assert spec.up_first == spelling.up_first
    assert spec.gate_up_layout == ("interleaved" if spelling.interleaved else "concatenated")


SPELLINGS = [
    Spelling(),
    Spelling(masks="5.17"),
    Spelling(masks="5.24", bias=True),
    Spelling("batched_mm"),
    Spelling("batched_mm", masks="5.24", bias=True),
    Spelling("batched_mm", transposed=True, interleaved=True, gate="swiglu_oai", bias=True),
    Spelling(transposed=True, interleaved=True, gate="swiglu_oai", bias=True),
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@pytest.mark.parametrize("decomposed", [False, True], ids=["aten", "decomposed"])
def test_transformers_forms_in_float32_agree_to_rounding(spelling: Spelling, decomposed: bool) -> None:
    module = Experts(spelling, dtype=torch.float32)
    inputs = random_inputs(module, sentinels=spelling.masks != "none")
    only_match(check_rewrite(capture(module, list(inputs), decomposed=decomposed, dynamic=(0, 1, 2)), tolerance=2e-6))


# T tokens, K top-k, E experts, H hidden, I intermediate, where one number could be taken for another.
AMBIGUOUS = {
    "one token": (1, 2, 4, 32, 16),
    "one token, one expert each": (1, 1, 4, 32, 16),
    "one expert": (5, 1, 1, 32, 16),
    "one expert, taken twice": (5, 2, 1, 32, 16),
    "S = H": (16, 2, 4, 32, 16),
    "S = I": (8, 2, 4, 32, 16),
    "S = 2I": (16, 2, 4, 16, 16),
    "S = E": (2, 2, 4, 32, 16),
    "T = K": (4, 4, 4, 32, 16),
    "H = I": (3, 2, 4, 16, 16),
    "H = 2I": (3, 2, 4, 32, 16),
    "all eight": (8, 8, 8, 8, 8),
}


@pytest.mark.parametrize("sizes", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("reduction", ["sum", "index_add"])
def test_ambiguous_sizes(sizes: tuple[int, int, int, int, int], form: str, reduction: str) -> None:
    tokens, top_k, experts, hidden, intermediate = sizes
    module = Experts(Spelling(form, reduction=reduction), experts=experts, hidden=hidden, intermediate=intermediate)
    found = check_rewrite(capture(module, list(random_inputs(module, tokens, top_k)), decomposed=True))
    assert only_match(found).spec.top_k == top_k


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("reduction", ["sum", "index_add"])
def test_unbacked_tokens(form: str, reduction: str) -> None:
    module = Experts(Spelling(form, reduction=reduction))
    captured = capture(module, list(random_inputs(module)), unbacked=(0, 1, 2))
    only_match(check_rewrite(captured))


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_no_tokens_give_an_empty_result(form: str) -> None:
    module = Experts(Spelling(form))
    captured = capture(module, list(random_inputs(module)), dynamic=(0, 1, 2))
    only_match(check_rewrite(captured.with_inputs(*random_inputs(module, tokens=0))))


def test_int32_ids() -> None:
    module = Experts()
    found = check_rewrite(capture(module, list(random_inputs(module, ids_dtype=torch.int32))))
    assert only_match(found).spec.top_k == 2


def test_sentinel_rows_do_not_reach_the_sum_whatever_they_hold() -> None:
    module = Experts(Spelling(masks="5.24"), dtype=torch.float32)
    inputs = random_inputs(module, sentinels=True)
    assert (inputs.topk_ids == module.num_experts).any()
    weights = torch.full_like(inputs.topk_weights, 0.5)  # of sentinel slots too: the masks alone make them zero
    captured = capture(module, [inputs.hidden_states, inputs.topk_ids, weights])
    only_match(check_rewrite(captured))


class Layers(torch.nn.Module):
    """Residual layers of expert blocks, each with its own module unless ``shared``."""

    def __init__(self, count: int, shared: bool = False, spelling: Spelling | None = None) -> None:
        super().__init__()
        first = Experts(spelling or Spelling(), dtype=torch.float32)
        self.layers = torch.nn.ModuleList(
            [first if shared else Experts(spelling or Spelling(), seed=i, dtype=torch.float32) for i in range(count)]
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, ids, weights)
        return x


def _capture_layers(module: Layers) -> Captured:
    return capture(module, list(random_inputs(module.layers[0])), decomposed=True, dynamic=(0, 1, 2))  # type: ignore[arg-type]


def test_twin_layers_are_found_in_order() -> None:
    captured = _capture_layers(Layers(3))
    found = check_rewrite(captured)
    names = [one.gate_up_proj.name for one in found if isinstance(one, MoEMatch)]
    assert len(found) == 3
    assert names == [node.name for node in captured.placeholders[:6:2]]


def test_one_module_called_twice_is_two_blocks_with_one_weight() -> None:
    found = check_rewrite(_capture_layers(Layers(2, shared=True)))
    assert len({one.down_proj for one in found if isinstance(one, MoEMatch)}) == 1
    assert len(found) == 2


def test_two_forms_in_one_graph() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Experts(Spelling("batched_mm"))
            self.second = Experts(Spelling("grouped_mm", gate="swiglu_oai"))

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x, ids, weights), ids, weights)
            return out

    module = Mixed()
    found = check_rewrite(capture(module, list(random_inputs(module.first))))
    assert [one.form for one in found] == ["batched_mm", "grouped_mm"]


def test_a_graph_without_experts_has_none() -> None:
    linear = torch.nn.Linear(8, 8)
    assert check_rewrite(capture(linear, [torch.randn(3, 8)])) == []


def test_hidden_states_and_sum_with_batch_and_sequence() -> None:
    """(B, L, H) flattened inside of the block and the sum taken as (B, L, K, H)."""
    module = Experts(Spelling("batched_mm"), dtype=torch.float32)

    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        flat = ids.reshape(-1)
        up = torch.bmm(module.gate_up_proj[flat], x.reshape(-1, hidden).repeat_interleave(2, 0).unsqueeze(-1))
        inner = module.activate(up.squeeze(-1))
        out = torch.bmm(module.down_proj[flat], inner.unsqueeze(-1)).squeeze(-1)
        out = out.view(batch, length, 2, hidden) * weights.unsqueeze(-1)
        return out.sum(-2)

    x, ids, weights = random_inputs(module)
    inputs = [x.view(2, 3, -1), ids.view(2, 3, 2), weights.view(2, 3, 2)]
    captured = capture(_with_weights(module, block), inputs, dynamic=(0, 1, 2))
    assert only_match(check_rewrite(captured)).spec.top_k == 2


def _with_weights(module: Experts, function: Any) -> torch.nn.Module:
    """A module with the weights of ``module`` and another forward."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = module

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = function(*args)
            return out

    return Wrapped()
