"""The reference against a slow loop in float64: per token, per k, gate functions in plain Python arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mxfp8_oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import layouts, mxfp8, reference
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import ExpertSpec, GateFunction

E, H, I, T, K = 5, 40, 33, 6, 3  # noqa: E741
ORDERS = ("occurring", "gathered", "dense")
orders = pytest.mark.parametrize("order", ORDERS)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(x, limit))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def swiglu_oai(g: float, u: float) -> float:
    g = min(g, 7.0)
    return g * sigmoid(1.702 * g) * (clamp(u, 7.0) + 1.0)


Formula = Callable[..., float]
SILU = GateFunction()
OAI = GateFunction("silu", alpha=1.702, limit=7.0, up_offset=1.0)
GATES: dict[str, tuple[GateFunction, Formula]] = {
    "silu": (SILU, lambda g, u: g * sigmoid(g) * u),
    "swiglu_oai": (OAI, swiglu_oai),
    "silu limit 10": (
        GateFunction(limit=10.0),
        lambda g, u: min(g, 10.0) * sigmoid(min(g, 10.0)) * clamp(u, 10.0),
    ),
    "silu limit 7": (GateFunction(limit=7.0), lambda g, u: min(g, 7.0) * sigmoid(min(g, 7.0)) * clamp(u, 7.0)),
    "silu limit 7 after": (
        GateFunction(limit=7.0, limit_after=True),
        lambda g, u: min(g * sigmoid(g), 7.0) * clamp(u, 7.0),
    ),
    "softcaps 4, 25": (
        GateFunction(gate_softcap=4.0, up_softcap=25.0),
        lambda g, u: 4.0 * math.tanh(g / 4.0) * sigmoid(g) * 25.0 * math.tanh(u / 25.0),
    ),
    "gelu_tanh": (GateFunction("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    "gelu": (GateFunction("gelu"), lambda g, u: 0.5 * g * (1.0 + math.erf(g / math.sqrt(2.0))) * u),
    "relu": (GateFunction("relu"), lambda g, u: max(g, 0.0) * u),
    "relu2 ungated": (GateFunction("relu2", gated=False), lambda x: max(x, 0.0) ** 2),
}
gates = pytest.mark.parametrize("name", GATES)


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_packed(gate: GateFunction = SILU, *, bias: bool = False, num_experts: int = E) -> PackedExperts:
    rows = 2 * I if gate.gated else I
    return layouts.pack_experts(
        ExpertSpec(num_experts, H, I, K, gate=gate, has_bias=bias),
        seeded(num_experts, rows, H, seed=0) * 0.7,
        seeded(num_experts, H, I, seed=1),
        seeded(num_experts, rows, seed=2) * 3 if bias else None,
        seeded(num_experts, H, seed=3) * 3 if bias else None,
    )


def make_inputs(dtype: torch.dtype = torch.float32, tokens: int = T, top_k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, E, (tokens, top_k), generator=torch.Generator().manual_seed(4))
    return seeded(tokens, H, seed=5, dtype=dtype), ids, seeded(tokens, top_k, seed=6).sigmoid().to(dtype)


def slow_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed: PackedExperts,
    formula: Formula,
    *,
    mxfp8_activations: bool = False,
) -> Tensor:
    """The definition, (T, H) float64, slot by slot; the intermediate is rounded to the dtype of the hidden states."""
    gate_up, gate_up_scale = packed.gate_up.view(torch.uint8), packed.gate_up_scale
    down, down_scale = packed.down.view(torch.uint8), packed.down_scale

    def seen(x: Tensor) -> Tensor:
        x = x.to(hidden_states.dtype)
        if mxfp8_activations:
            return mxfp8_oracle.dequantize(*mxfp8_oracle.quantize(x[None]))[0]
        return x.double()

    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, row in enumerate(topk_ids.tolist()):
        for slot, expert in enumerate(row):
            if not 0 <= expert < packed.num_experts:
                continue
            projected = mxfp8_oracle.dequantize(gate_up[expert], gate_up_scale[expert]) @ seen(hidden_states[token])
            if packed.gate_up_bias is not None:
                projected = projected + packed.gate_up_bias[expert].double()
            split = projected.reshape(-1, packed.intermediate_size).tolist()
            intermediate = torch.tensor([formula(*pair) for pair in zip(*split, strict=True)], dtype=torch.float64)
            expert_out = mxfp8_oracle.dequantize(down[expert], down_scale[expert]) @ seen(intermediate)
            if packed.down_bias is not None:
                expert_out = expert_out + packed.down_bias[expert].double()
            out[token] += float(topk_weights[token, slot]) * expert_out
    return out


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


# The gate functions

# (12, -12) and (-1, 2) tell every known family apart; computed independently in float64.
VECTORS = [
    (SILU, 12.0, -12.0, -143.9991),
    (GateFunction(limit=10.0), 12.0, -12.0, -99.9955),
    (OAI, 12.0, -12.0, -41.9997),
    (OAI, -12.0, 12.0, -1.3e-7),
    (GateFunction(limit=7.0), 12.0, -12.0, -48.9554),
    (GateFunction(limit=7.0, limit_after=True), 12.0, -12.0, -49.0),
    (GateFunction(gate_softcap=4.0, up_softcap=25.0), 12.0, -12.0, -44.4034),
    (GateFunction("gelu_tanh"), 12.0, -12.0, -144.0),
    (SILU, -1.0, 2.0, -0.53788),
    (SILU, 2.0, -1.0, -1.76159),
    (GateFunction("gelu_tanh"), -1.0, 2.0, -0.31762),
    (OAI, -1.0, 2.0, -0.46261),
    (GateFunction(gate_softcap=4.0, up_softcap=25.0), -1.0, 2.0, -0.52583),
]


@pytest.mark.parametrize(("gate", "g", "u", "expected"), VECTORS)
def test_discriminating_vectors(gate: GateFunction, g: float, u: float, expected: float) -> None:
    out = gate(torch.tensor(g, dtype=torch.float64), torch.tensor(u, dtype=torch.float64))
    assert float(out) == pytest.approx(expected, rel=0.02 if abs(expected) < 1e-3 else 2e-5)


@gates
def test_gate_functions_against_plain_arithmetic(name: str) -> None:
    gate, formula = GATES[name]
    points = [
        (g, u) for g in (-13.0, -7.0, -1.0, 0.0, 0.3, 2.0, 7.5, 11.0) for u in (-12.0, -8.0, -0.5, 1.0, 7.2, 30.0)
    ]
    g, u = torch.tensor(points, dtype=torch.float64).unbind(1)
    got = gate(g, u) if gate.gated else gate(g)
    expected = [formula(*point) if gate.gated else formula(point[0]) for point in points]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


# The block


@gates
@orders
@pytest.mark.parametrize("bias", [False, True])
def test_exact_in_float64(name: str, order: Any, bias: bool) -> None:
    gate, formula = GATES[name]
    packed, inputs = make_packed(gate, bias=bias), make_inputs()
    expected = slow_experts(*inputs, packed, formula)
    got = reference.experts(
        *inputs, packed, gate, compute_dtype=torch.float64, out_dtype=torch.float64, evaluation=order
    )
    assert relative_error(got, expected) < 1e-12


@orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_every_dtype_and_activation_format(dtype: torch.dtype, activations: str, order: Any) -> None:
    packed, inputs = make_packed(OAI, bias=True), make_inputs(dtype)
    expected = slow_experts(*inputs, packed, swiglu_oai, mxfp8_activations=activations == "mxfp8")
    arguments: dict[str, Any] = {"activations": activations, "evaluation": order}
    exact = reference.experts(*inputs, packed, OAI, compute_dtype=torch.float64, out_dtype=torch.float64, **arguments)
    assert relative_error(exact, expected) < 1e-12
    # float32 accumulation: its own error, and now and then an intermediate that rounds the other way.
    single = reference.experts(*inputs, packed, OAI, out_dtype=torch.float32, **arguments)
    assert relative_error(single, expected) < (1e-6 if dtype == torch.float32 and activations == "bf16" else 5e-4)
    rounded = reference.experts(*inputs, packed, OAI, **arguments)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, single.to(dtype), rtol=0, atol=0)


def test_mxfp8_activations_differ_from_bf16() -> None:
    packed, inputs = make_packed(), make_inputs(torch.bfloat16)
    error = relative_error(
        reference.experts(*inputs, packed, SILU, activations="mxfp8"),
        reference.experts(*inputs, packed, SILU),
    )
    assert 0.005 < error < 0.1  # E4M3 keeps four significant bits


def test_the_intermediate_is_rounded_to_the_hidden_dtype() -> None:
    # One expert, one channel: gate 1 and up 1 + 2**-7 + 2**-9 (bias), relu; bfloat16 keeps 1 + 2**-7.
    gate = GateFunction("relu")
    packed = layouts.pack_experts(
        ExpertSpec(1, 1, 1, 1, gate=gate, has_bias=True),
        torch.zeros(1, 2, 1),
        torch.ones(1, 1, 1),
        torch.tensor([[1.0, 1 + 2**-7 + 2**-9]]),
    )
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for dtype, expected in ((torch.bfloat16, 1 + 2**-7), (torch.float32, 1 + 2**-7 + 2**-9)):
        hidden_states = torch.zeros(1, 1, dtype=dtype)
        out = reference.experts(hidden_states, ids, weights, packed, gate, out_dtype=torch.float32)
        assert out.item() == expected


def test_routing_weights_keep_their_own_precision() -> None:
    packed, (hidden_states, ids, _) = make_packed(), make_inputs(torch.bfloat16)
    weights = seeded(T, K, seed=7).sigmoid()  # float32, beside bfloat16 hidden states
    got = reference.experts(hidden_states, ids, weights, packed, SILU, out_dtype=torch.float32)
    expected = slow_experts(hidden_states, ids, weights, packed, GATES["silu"][1])
    rounded = slow_experts(hidden_states, ids, weights.bfloat16(), packed, GATES["silu"][1])
    assert relative_error(got, expected) < 5e-4 < relative_error(rounded, expected)


# Routing


@orders
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (1, 3), (1, 1), (7, 1), (4, 0)])
def test_sizes(tokens: int, top_k: int, ids_dtype: torch.dtype, order: Any) -> None:
    packed, (hidden_states, ids, weights) = make_packed(), make_inputs(tokens=tokens, top_k=top_k)
    got = reference.experts(hidden_states, ids.to(ids_dtype), weights, packed, SILU, evaluation=order)
    expected = slow_experts(hidden_states, ids, weights, packed, GATES["silu"][1])
    assert got.shape == (tokens, H)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


@orders
def test_one_expert_twice_in_a_row_counts_twice(order: Any) -> None:
    packed, (hidden_states, _, weights) = make_packed(), make_inputs()
    ids = torch.tensor([[2, 2, 2], [0, 4, 0], [1, 1, 3], [3, 2, 1], [4, 4, 4], [0, 0, 1]])
    got = reference.experts(hidden_states, ids, weights, packed, SILU, evaluation=order)
    assert relative_error(got, slow_experts(hidden_states, ids, weights, packed, GATES["silu"][1])) < 1e-6


@orders
def test_sentinels_contribute_zero_whatever_is_there(order: Any) -> None:
    packed, (hidden_states, ids, weights) = make_packed(bias=True), make_inputs()
    ids = ids.clamp(max=3)  # nobody chooses expert 4
    ids[0] = torch.tensor([-1, E, 2**31 - 1])
    ids[1, 1], ids[2, 0] = -7, E
    expected = slow_experts(hidden_states, ids, weights, packed, GATES["silu"][1])
    sentinel = (ids < 0) | (ids >= E)
    weights = weights.masked_fill(sentinel, math.nan)
    packed.gate_up_scale[4] = packed.down_scale[4] = 255
    assert packed.gate_up_bias is not None
    packed.gate_up_bias[4] = math.inf
    got = reference.experts(hidden_states, ids, weights, packed, SILU, evaluation=order)
    assert torch.equal(got[0], torch.zeros(H))
    assert relative_error(got, expected) < 1e-6


@orders
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_a_nan_stays_where_it_belongs(order: Any, activations: str) -> None:
    packed, (hidden_states, ids, weights) = make_packed(), make_inputs()
    ids[4] = torch.tensor([-1, -1, -1])
    arguments: dict[str, Any] = {"activations": activations, "evaluation": order}
    clean = reference.experts(hidden_states, ids, weights, packed, SILU, **arguments)
    hidden_states[2, 7] = hidden_states[4, 7] = math.nan
    got = reference.experts(hidden_states, ids, weights, packed, SILU, **arguments)
    assert got[2].isnan().all()
    assert torch.equal(got[4], torch.zeros(H))  # no expert, so not even its own NaN
    torch.testing.assert_close(got[[0, 1, 3, 5]], clean[[0, 1, 3, 5]], rtol=1e-5, atol=1e-5)


@orders
def test_a_chosen_nan_expert_reaches_its_tokens_only(order: Any) -> None:
    packed, (hidden_states, _, weights) = make_packed(), make_inputs()
    ids = torch.tensor([[0, 1, 2], [4, 1, 2], [3, 1, 0], [0, 4, 3], [2, 1, 0], [1, 2, 3]])
    packed.down_scale[4] = 255
    got = reference.experts(hidden_states, ids, weights, packed, SILU, evaluation=order)
    assert got.isnan().all(1).tolist() == [False, True, False, True, False, False]
    assert got[[0, 2, 4, 5]].isfinite().all()


@orders
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_expert_map(order: Any, map_dtype: torch.dtype) -> None:
    packed, (hidden_states, _, weights) = make_packed(num_experts=3), make_inputs()
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, 3], dtype=map_dtype)  # the last names no expert here either
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 1, 6], [-1, 7, 3], [2, 0, 5], [4, 100, -100]])
    local = torch.tensor([[-1, 2, -1], [0, 1, -1], [2, 2, -1], [-1, -1, 0], [-1, -1, -1], [1, -1, -1]])
    got = reference.experts(hidden_states, ids, weights, packed, SILU, expert_map=expert_map, evaluation=order)
    assert relative_error(got, slow_experts(hidden_states, local, weights, packed, GATES["silu"][1])) < 1e-6


@orders
def test_a_rank_without_experts(order: Any) -> None:
    packed, inputs = make_packed(num_experts=1), make_inputs()
    empty = replace(
        packed,
        gate_up=packed.gate_up[:0],
        gate_up_scale=packed.gate_up_scale[:0],
        down=packed.down[:0],
        down_scale=packed.down_scale[:0],
    )
    got = reference.experts(*inputs, empty, SILU, expert_map=torch.full((E,), -1), evaluation=order)
    assert torch.equal(got, torch.zeros(T, H))


# Evaluation


@pytest.mark.parametrize("order", ["gathered", "dense"])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * 2 * 4 * 3 * I * H, 1 << 28])
def test_chunks_do_not_change_the_result(order: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK_BYTES", chunk_bytes)
    packed, inputs = make_packed(), make_inputs(tokens=11)
    got = reference.experts(*inputs, packed, SILU, evaluation=order)
    assert relative_error(got, slow_experts(*inputs, packed, GATES["silu"][1])) < 1e-6


@pytest.mark.parametrize("tokens", [0, 1, 2, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_tensors(tokens: int, dtype: torch.dtype) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        packed = PackedExperts(
            torch.empty(E, 2 * I, H, dtype=torch.float8_e4m3fn),
            torch.empty(E, 2 * I, mxfp8.scale_count(H), dtype=torch.uint8),
            torch.empty(E, H, I, dtype=torch.float8_e4m3fn),
            torch.empty(E, H, mxfp8.scale_count(I), dtype=torch.uint8),
        )
        hidden_states = torch.empty(tokens, H, dtype=dtype)
        ids, weights = torch.empty(tokens, K, dtype=torch.int64), torch.empty(tokens, K)
        for activations in ("bf16", "mxfp8"):
            out = reference.experts(hidden_states, ids, weights, packed, SILU, activations=activations)
            assert out.shape == (tokens, H)
            assert out.stride() == (H, 1)
            assert out.dtype == dtype


@orders
def test_the_result_is_new_and_the_inputs_are_unchanged(order: Any) -> None:
    packed, inputs = make_packed(), make_inputs()
    before = [t.clone() for t in inputs]
    got = reference.experts(*inputs, packed, SILU, evaluation=order)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert got.data_ptr() not in [t.data_ptr() for t in inputs]


def test_dequantized() -> None:
    packed = make_packed()
    gate_up, down = reference.dequantized(packed, torch.float64)
    assert torch.equal(
        gate_up[1], mxfp8_oracle.dequantize(packed.gate_up[1].view(torch.uint8), packed.gate_up_scale[1])
    )
    assert torch.equal(down[2], mxfp8_oracle.dequantize(packed.down[2].view(torch.uint8), packed.down_scale[2]))


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(T, H + 1)}, r"hidden_states has shape \(6, 41\), expected \(T, 40\)"),
        ({"hidden_states": torch.zeros(T, H, dtype=torch.int32)}, "hidden_states is torch.int32, expected float32"),
        ({"topk_ids": torch.zeros(T + 1, K, dtype=torch.int64)}, r"topk_ids has shape \(7, 3\), expected .* T = 6"),
        ({"topk_ids": torch.zeros(T, K)}, "topk_ids is torch.float32, expected torch.int32 or torch.int64"),
        ({"topk_weights": torch.zeros(T, K + 1)}, r"topk_weights has shape \(6, 4\), topk_ids \(6, 3\)"),
        ({"topk_weights": torch.zeros(T, K, dtype=torch.int64)}, "topk_weights is torch.int64"),
        ({"gate": GateFunction("relu2", gated=False)}, "66 rows for I = 33, which gated=False does not fit"),
        ({"expert_map": torch.zeros(E)}, "expert_map is torch.float32"),
        ({"activations": "fp8"}, "activations: got 'fp8', choices are bf16, mxfp8"),
        ({"compute_dtype": torch.bfloat16}, "compute_dtype: got torch.bfloat16"),
        ({"evaluation": "sorted"}, "evaluation: got 'sorted', choices are auto, occurring"),
    ],
)
def test_errors_name_the_value_and_the_choices(change: dict[str, Any], message: str) -> None:
    hidden_states, ids, weights = make_inputs()
    arguments: dict[str, Any] = {
        "hidden_states": hidden_states,
        "topk_ids": ids,
        "topk_weights": weights,
        "packed": make_packed(),
        "gate": SILU,
    }
    with pytest.raises(ExpertInputError, match=message):
        reference.experts(**(arguments | change))
