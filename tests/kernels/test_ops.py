"""The expert operators: schema, fake, checks, and the reference operator's values."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_modules import relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_compile import packed_weights
from moe_compile.errors import ExpertInputError
from moe_compile.kernels import layouts, ops, reference
from moe_compile.kernels.mxfp8 import quantize
from moe_compile.spec import ExpertSpec, GateFunction

T, K, E, H, I = 5, 2, 4, 64, 32  # noqa: E741
OPERATORS = [ops.operator(name) for name in ops.KERNELS]
experts = ops.operator("reference")

GATES = {
    "silu": GateFunction(),
    "m3": GateFunction(alpha=1.702, limit=7.0, up_offset=1.0),
    "limit_after": GateFunction(limit=1.0, limit_after=True),
    "softcaps": GateFunction(gate_softcap=4.0, up_softcap=25.0),
    "gelu_tanh": GateFunction("gelu_tanh"),
    "plain": GateFunction("relu2", gated=False),
}


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    packed_weights.clear()
    yield
    packed_weights.clear()


def arguments(
    *,
    tokens: int = T,
    gate: GateFunction = GATES["silu"],
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    bias: bool = False,
    scales: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional tensors and keyword arguments of the operator, the latter at their defaults left out."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = 2 * I if gate.gated else I
    ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
    weights = torch.softmax(randn(tokens, K), -1)
    gate_up, down = randn(E, rows, H) / 8, randn(E, H, I) / 6
    keywords: dict[str, Any] = {}
    if scales is None:
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        if transposed:
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    else:
        (gate_up, gate_up_scale), (down, down_scale) = quantize(gate_up), quantize(down)
        keywords |= {"gate_up_scale": gate_up_scale.view(scales), "down_scale": down_scale.view(scales)}
    if bias:
        keywords |= {"gate_up_bias": randn(E, rows).to(dtype), "down_bias": randn(E, H).to(dtype)}
    spec = ExpertSpec(E, H, I, K, gate=gate, transposed=transposed)
    return (randn(tokens, H).to(dtype), ids, weights, gate_up, down), keywords | ops.attributes(spec)


def expected(positional: tuple[Tensor, ...], keywords: dict[str, Any], spec: ExpertSpec, **more: Any) -> Tensor:
    hidden, ids, weights, gate_up, down = positional
    named = {name: keywords.get(name) for name in ("gate_up_bias", "down_bias", "gate_up_scale", "down_scale")}
    packed = layouts.pack_experts(spec, gate_up, down, **named)
    out: Tensor = reference.experts(hidden, ids, weights, packed, spec.gate, **more)
    return out


CASES: dict[str, dict[str, Any]] = {
    **{f"gate {name}": {"gate": gate} for name, gate in GATES.items()},
    "transposed": {"transposed": True},
    "biases": {"bias": True},
    "uint8 scales": {"scales": torch.uint8},
    "e8m0 scales": {"scales": torch.float8_e8m0fnu, "bias": True},
    "fp32": {"dtype": torch.float32},
    "no tokens": {"tokens": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_reference_on_packed_weights(case: str) -> None:
    positional, keywords = arguments(**CASES[case])
    spec = ExpertSpec(E, H, I, K, gate=CASES[case].get("gate", GATES["silu"]), transposed=case == "transposed")
    out = experts(*positional, **keywords)
    assert torch.equal(out, expected(positional, keywords, spec))
    assert out.shape == positional[0].shape
    assert out.dtype == positional[0].dtype


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    positional, keywords = arguments(**CASES[case])
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # The schema check compares inputs with allclose, which torch has not for float8: see test_inputs_are_not_touched.
    torch.library.opcheck(experts, positional, keywords, test_utils=utils[1:] if "scales" in case else utils)


def test_opcheck_with_expert_map_and_out_dtype() -> None:
    positional, _ = arguments(bias=True)
    expert_map = torch.tensor([-1, 0, 1, -1, 2, 3], dtype=torch.int32)
    torch.library.opcheck(experts, positional, {"expert_map": expert_map, "out_dtype": torch.float32})


@pytest.mark.parametrize("case", ["gate silu", "gate m3", "biases", "e8m0 scales"])
def test_opcheck_of_the_triton_operator_without_running_it(case: str) -> None:
    """Its kernels need a GPU; schema, fake and autograd registrations do not."""
    positional, keywords = arguments(**CASES[case])
    checks = ("test_autograd_registration",)
    torch.library.opcheck(ops.operator("triton"), positional, keywords, test_utils=checks)


def test_expert_map_and_out_dtype() -> None:
    positional, _ = arguments()
    hidden, _, *rest = positional
    global_ids = torch.tensor([[1, 0], [2, 4], [5, 3], [4, 1], [0, 3]])
    expert_map = torch.tensor([-1, 0, 1, -1, 2, 3])
    local_ids = torch.tensor([[0, -1], [1, 2], [3, -1], [2, 0], [-1, -1]])
    mapped = experts(hidden, global_ids, *rest, expert_map=expert_map, out_dtype=torch.float32)
    assert torch.equal(mapped, experts(hidden, local_ids, *rest, out_dtype=torch.float32))
    assert mapped.dtype == torch.float32
    assert (mapped[4] == 0).all()
    assert mapped[0].norm() > 0


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_the_fake_with_a_symbolic_number_of_tokens(operator: Any, out_dtype: torch.dtype | None) -> None:
    positional, _ = arguments()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [mode.from_tensor(t, static_shapes=i > 2) for i, t in enumerate(positional)]
        tokens: Any = fakes[0].shape[0]
        out = operator(*fakes, out_dtype=out_dtype)
    assert isinstance(tokens, torch.SymInt)
    assert out.shape[0] is tokens or out.shape[0].node.expr == tokens.node.expr
    assert out.shape[1] == H
    assert out.stride(1) == 1
    assert out.dtype == (out_dtype or torch.bfloat16)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_meta_tensors(operator: Any) -> None:
    positional, _ = arguments()
    out = operator(*(t.to("meta") for t in positional))
    assert (out.is_meta, out.shape, out.stride()) == (True, (T, H), (H, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, T])
def test_the_result_is_contiguous_whatever_the_hidden_states_are(dtype: torch.dtype, tokens: int) -> None:
    (hidden, *rest), _ = arguments(dtype=dtype, tokens=tokens)
    wanted = experts(hidden, *rest)
    for strided in (
        hidden.t().contiguous().t(),
        torch.stack([hidden, hidden], -1)[..., 0],
        hidden[:1].expand(tokens, H),
    ):
        out = experts(strided, *rest)
        with FakeTensorMode() as mode:
            fake = ops.operator("reference")(*(mode.from_tensor(t) for t in (strided, *rest)))
        assert out.stride() == fake.stride() == (H, 1)
        assert out.data_ptr() != strided.data_ptr()
        if torch.equal(strided, hidden):
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("scales", [None, torch.uint8, torch.float8_e8m0fnu])
def test_inputs_are_not_touched(scales: torch.dtype | None) -> None:
    positional, keywords = arguments(bias=True, scales=scales)
    tensors = [*positional, *(v for v in keywords.values() if isinstance(v, Tensor))]
    copies = [t.clone() for t in tensors]
    experts(*positional, **keywords)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
        assert tensor._version == 0


class TestPacking:
    def test_once_for_every_call_and_operator_argument(self) -> None:
        positional, _ = arguments()
        hidden, ids, weights, *rest = positional
        experts(*positional)
        before = packed_weights.statistics()
        experts(hidden[:1], ids[:1], weights[:1], *rest, limit=3.0)
        assert packed_weights.statistics() == before
        assert before.entries == 1

    def test_an_in_place_change_is_followed(self) -> None:
        positional, keywords = arguments()
        experts(*positional)
        positional[4].mul_(2)
        spec = ExpertSpec(E, H, I, K)
        assert torch.equal(experts(*positional), expected(positional, keywords, spec))
        assert packed_weights.statistics().entries == 1

    def test_canonical_mxfp8_weights_are_neither_copied_nor_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        positional, keywords = arguments(scales=torch.uint8, bias=True)
        seen: list[Any] = []

        def kernel(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(args[3])
            return torch.zeros_like(args[0])

        ops._run(kernel, *positional, **keywords)
        (packed,) = seen
        assert packed.gate_up.data_ptr() == positional[3].data_ptr()
        assert packed.down_scale.data_ptr() == keywords["down_scale"].data_ptr()
        assert packed.down_bias.data_ptr() == keywords["down_bias"].data_ptr()
        assert packed_weights.statistics().entries == 0

    def test_mxfp8_weights_in_another_order_are_packed_and_let_go(self) -> None:
        positional, keywords = arguments(scales=torch.uint8, bias=True)
        keywords |= {"gate_up_layout": "interleaved", "up_first": True}
        spec = ExpertSpec(E, H, I, K, gate_up_layout="interleaved", up_first=True)
        assert torch.equal(experts(*positional, **keywords), expected(positional, keywords, spec))
        assert packed_weights.statistics().entries == 1
        del positional, keywords
        gc.collect()
        assert packed_weights.statistics().entries == 0


class TestAttributes:
    def test_defaults_are_the_schemas(self) -> None:
        for operator in OPERATORS:
            keyword_only = {a.name: a.default_value for a in operator._schema.arguments if a.kwarg_only}
            assert keyword_only == ops._DEFAULTS

    @pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
    def test_round_trip(self, gate: GateFunction) -> None:
        """The attributes of a spec make the operator see the same spec."""
        spec = ExpertSpec(
            E, H, I, K, gate=gate, gate_up_layout="interleaved", up_first=True, transposed=True, out_dtype=torch.float32
        )
        keywords = ops.attributes(spec, "mxfp8")
        positional, _ = arguments(gate=gate, transposed=True)
        seen: dict[str, Any] = {}

        def kernel(
            hidden: Tensor, ids: Tensor, weights: Tensor, packed: Any, gate: GateFunction, **rest: Any
        ) -> Tensor:
            seen.update(rest, gate=gate, packed=packed)
            return hidden

        ops._run(kernel, *positional, **keywords)
        assert seen["gate"] == gate
        assert seen["activations"] == "mxfp8"
        assert seen["out_dtype"] == torch.float32
        packed = layouts.pack_experts(spec, *positional[3:])
        assert torch.equal(seen["packed"].gate_up.view(torch.uint8), packed.gate_up.view(torch.uint8))

    def test_only_what_differs_is_written(self) -> None:
        assert ops.attributes(ExpertSpec(E, H, I, K)) == {}
        assert ops.attributes(ExpertSpec(E, H, I, K, gate=GATES["m3"])) == {
            "alpha": 1.702,
            "limit": 7.0,
            "up_offset": 1.0,
        }
        half = replace(ExpertSpec(E, H, I, K), activation_dtype=torch.float16, out_dtype=torch.float16)
        assert ops.attributes(half) == {}

    def test_activations_reach_the_kernel(self) -> None:
        positional, _ = arguments()
        plain, quantised = experts(*positional), experts(*positional, activations="mxfp8")
        assert 0.005 < relative_error(quantised, plain) < 0.1
        assert torch.equal(plain, experts(*positional, activations="bf16"))


def test_expert_operators_are_told_from_others() -> None:
    assert all(map(ops.is_expert_operator, OPERATORS))
    assert not ops.is_expert_operator(torch.ops.aten.mm.default)


@pytest.mark.parametrize("which", ["hidden_states", "gate_up_proj"])
def test_backward_is_a_clear_error(which: str) -> None:
    positional, _ = arguments()
    positional[0 if which == "hidden_states" else 3].requires_grad_()
    out = experts(*positional)
    with pytest.raises(NotImplementedError, match="have no gradient.*torch.no_grad"):
        out.sum().backward()


BAD: dict[str, tuple[dict[int, Tensor], dict[str, Any], str]] = {
    "3-D hidden states": ({0: torch.zeros(1, T, H)}, {}, r"hidden_states must be \(T, H\), got shape \(1, 5, 64\)"),
    "hidden size": ({0: torch.zeros(T, 32)}, {}, "hidden_states has H=32, but the weights have H=64"),
    "integer hidden states": ({0: torch.zeros(T, H, dtype=torch.int32)}, {}, "floating point, got torch.int32"),
    "ids of other tokens": ({1: torch.zeros(3, K, dtype=torch.int64)}, {}, r"topk_ids must be \(T, K\) with T=5"),
    "float ids": ({1: torch.zeros(T, K)}, {}, "topk_ids must be int32 or int64, got torch.float32"),
    "weights of another k": ({2: torch.zeros(T, 3)}, {}, r"shape of topk_ids \(5, 2\), got \(5, 3\)"),
    "2-D weights": ({3: torch.zeros(2 * I, H)}, {}, "must be 3-D"),
    "numbers of experts": ({4: torch.zeros(3, H, I)}, {}, "one number of experts"),
    "rows": ({3: torch.zeros(E, I, H)}, {}, r"gate_up_proj: got shape \(4, 32, 64\), expected \(4, 64, 64\)"),
    "integer weights": ({3: torch.zeros(E, 2 * I, H, dtype=torch.int32)}, {}, "gate_up_proj.*got int32"),
    "float8 without scales": ({3: torch.zeros(E, 2 * I, H).to(torch.float8_e4m3fn)}, {}, "need gate_up_scale"),
    "one scale": ({}, {"gate_up_scale": torch.zeros(E, 2 * I, 2, dtype=torch.uint8)}, "given together"),
    "expert map": ({}, {"expert_map": torch.zeros(6)}, r"expert_map must be \(E_global,\) int32 or int64"),
    "out_dtype": ({}, {"out_dtype": torch.int32}, "out_dtype must be floating point, got torch.int32"),
    "activation": ({}, {"activation": "swish"}, "activation: got 'swish', choices are silu"),
    "layout": ({}, {"gate_up_layout": "other"}, "gate_up_layout: got 'other', choices are concatenated"),
    "alpha of gelu": ({}, {"activation": "gelu", "alpha": 2.0}, "belong to silu"),
    "activations": ({}, {"activations": "fp4"}, "activations: got 'fp4', choices are"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs_are_named(case: str) -> None:
    tensors, keywords, message = BAD[case]
    positional, _ = arguments()
    with pytest.raises(ExpertInputError, match=message) as caught:
        experts(*(tensors.get(i, t) for i, t in enumerate(positional)), **keywords)
    assert isinstance(caught.value, ValueError)


def test_transposed_mxfp8_weights_are_refused() -> None:
    positional, keywords = arguments(scales=torch.uint8)
    with pytest.raises(ExpertInputError, match="transposed=True with block scales"):
        experts(*positional, **keywords, transposed=True)


def test_the_kernel_gets_a_device_of_its_own_and_says_so() -> None:
    positional, _ = arguments()
    with pytest.raises(ExpertInputError, match="down_bias is on meta, hidden_states on cpu"):
        ops._run(ops.KERNELS["reference"], *positional, down_bias=torch.zeros(E, H, device="meta"))
