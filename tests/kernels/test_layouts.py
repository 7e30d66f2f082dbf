"""Packing: every layout ends as the same canonical bytes, what is canonical is shared, repacking keeps addresses."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import mxfp8
from moe_compile.kernels.layouts import copies_nothing, pack_experts, repack_into
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import ExpertSpec, GateFunction

E, H, I = 3, 40, 33  # both contracted dimensions are ragged  # noqa: E741
FLAGS = list(itertools.product((False, True), ("concatenated", "interleaved"), (False, True), (True, False)))
flags = pytest.mark.parametrize(("transposed", "layout", "up_first", "gated"), FLAGS)


def spec_of(transposed: bool, layout: str, up_first: bool, gated: bool) -> ExpertSpec:
    gate = GateFunction() if gated else GateFunction("relu2", gated=False)
    return ExpertSpec(E, H, I, 2, gate=gate, gate_up_layout=layout, up_first=up_first, transposed=transposed)


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded_bytes(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def in_model_order(canonical: Tensor, spec: ExpertSpec) -> Tensor:
    """Rows (dimension 1) from gate-then-up to the order of the spec, one row at a time."""
    if not spec.gate.gated:
        return canonical.clone()
    gate, up = list(canonical[:, :I].unbind(1)), list(canonical[:, I:].unbind(1))
    first, second = (up, gate) if spec.up_first else (gate, up)
    if spec.gate_up_layout == "interleaved":
        rows = [row for pair in zip(first, second, strict=True) for row in pair]
    else:
        rows = first + second
    return torch.stack(rows, dim=1)


def tensors_of(packed: PackedExperts) -> dict[str, Tensor]:
    named = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def assert_same_bytes(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


# Float weights


@flags
@pytest.mark.parametrize("bias", [False, True])
def test_float_weights(transposed: bool, layout: str, up_first: bool, gated: bool, bias: bool) -> None:
    spec = replace(spec_of(transposed, layout, up_first, gated), has_bias=bias)
    rows = 2 * I if gated else I
    gate_up, down = seeded(E, rows, H, seed=0, dtype=torch.bfloat16), seeded(E, H, I, seed=1, dtype=torch.bfloat16)
    gate_up_bias, down_bias = (seeded(E, rows, seed=2), seeded(E, H, seed=3)) if bias else (None, None)

    given_gate_up, given_down = in_model_order(gate_up, spec), down
    if transposed:
        given_gate_up, given_down = given_gate_up.mT.contiguous(), given_down.mT.contiguous()
    given_bias = None if gate_up_bias is None else in_model_order(gate_up_bias, spec)
    packed = pack_experts(spec, given_gate_up, given_down, given_bias, down_bias)

    for got, expected in (
        ((packed.gate_up, packed.gate_up_scale), mxfp8.quantize(gate_up)),
        ((packed.down, packed.down_scale), mxfp8.quantize(down)),
    ):
        assert_same_bytes(got[0], expected[0])
        assert_same_bytes(got[1], expected[1])
    if gate_up_bias is None:
        assert packed.gate_up_bias is None
        assert packed.down_bias is None
    else:
        assert packed.gate_up_bias is not None
        assert packed.down_bias is not None
        assert_same_bytes(packed.gate_up_bias, gate_up_bias)
        assert torch.equal(packed.down_bias, seeded(E, H, seed=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_float_dtypes(dtype: torch.dtype) -> None:
    gate_up, down = seeded(E, 2 * I, H, seed=0, dtype=dtype), seeded(E, H, I, seed=1, dtype=dtype)
    packed = pack_experts(ExpertSpec(E, H, I, 2), gate_up, down)
    assert_same_bytes(packed.gate_up, mxfp8.quantize(gate_up)[0])
    assert_same_bytes(packed.down, mxfp8.quantize(down)[0])


def test_strided_float_weights_and_parameters() -> None:
    gate_up, down = seeded(2 * E, 2 * I, H, seed=0), seeded(E, H, 2 * I, seed=1)
    parameter = torch.nn.Parameter(gate_up)
    packed = pack_experts(ExpertSpec(E, H, I, 2), parameter[::2], down[..., ::2])
    assert_same_bytes(packed.gate_up, mxfp8.quantize(gate_up[::2])[0])
    assert_same_bytes(packed.down, mxfp8.quantize(down[..., ::2])[0])
    assert not packed.gate_up.requires_grad


# MXFP8 weights


def mxfp8_weights(gated: bool = True) -> dict[str, Tensor]:
    """Canonical, as bytes."""
    rows = 2 * I if gated else I
    return {
        "gate_up": seeded_bytes(E, rows, H, seed=0),
        "gate_up_scale": seeded_bytes(E, rows, 2, seed=1),
        "down": seeded_bytes(E, H, I, seed=2),
        "down_scale": seeded_bytes(E, H, 2, seed=3),
    }


@flags
@pytest.mark.parametrize("as_bytes", [False, True])
def test_mxfp8_weights_are_reordered_bit_for_bit(
    transposed: bool, layout: str, up_first: bool, gated: bool, as_bytes: bool
) -> None:
    spec = spec_of(transposed, layout, up_first, gated)  # K is last even if the spec is transposed
    weights = mxfp8_weights(gated)
    element, scale = (torch.uint8, torch.uint8) if as_bytes else (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    packed = pack_experts(
        spec,
        in_model_order(weights["gate_up"], spec).view(element),
        weights["down"].view(element),
        gate_up_scale=in_model_order(weights["gate_up_scale"], spec).view(scale),
        down_scale=weights["down_scale"].view(scale),
    )
    assert_same_bytes(packed.gate_up, weights["gate_up"].view(torch.float8_e4m3fn))
    assert_same_bytes(packed.gate_up_scale, weights["gate_up_scale"])
    assert_same_bytes(packed.down, weights["down"].view(torch.float8_e4m3fn))
    assert_same_bytes(packed.down_scale, weights["down_scale"])


def canonical_arguments() -> dict[str, Tensor]:
    weights = mxfp8_weights()
    return {
        "gate_up_proj": weights["gate_up"].view(torch.float8_e4m3fn),
        "down_proj": weights["down"].view(torch.float8_e4m3fn),
        "gate_up_scale": weights["gate_up_scale"].view(torch.float8_e8m0fnu),
        "down_scale": weights["down_scale"],
        "gate_up_bias": seeded(E, 2 * I, seed=4),
        "down_bias": seeded(E, H, seed=5),
    }


def test_canonical_mxfp8_weights_are_shared_not_copied() -> None:
    given = canonical_arguments()
    packed = pack_experts(ExpertSpec(E, H, I, 2, has_bias=True), **given)
    for name, tensor in tensors_of(packed).items():
        source = given.get(name, given.get(f"{name}_proj"))
        assert source is not None
        assert tensor.data_ptr() == source.data_ptr(), name
        assert tensor is not source  # holding the result must not keep the model's parameter object alive
    assert copies_nothing(ExpertSpec(E, H, I, 2, has_bias=True), **given)


def test_repacking_shared_storage_writes_nothing() -> None:
    given, spec = canonical_arguments(), ExpertSpec(E, H, I, 2)
    packed = pack_experts(spec, **given)
    versions = {name: tensor._version for name, tensor in given.items()}
    repack_into(packed, spec, **given)
    # A write, even of the same bytes, would look like a change of the weights and ask for another repack.
    assert {name: tensor._version for name, tensor in given.items()} == versions


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        ({}, ExpertSpec(E, H, I, 2, up_first=True)),
        ({}, ExpertSpec(E, H, I, 2, gate_up_layout="interleaved")),
        ({"down_bias": seeded(E, 2 * H, seed=5)[:, ::2]}, ExpertSpec(E, H, I, 2)),
        ({"down_scale": seeded_bytes(E, H, 4, seed=5)[..., ::2]}, ExpertSpec(E, H, I, 2)),
        ({"down_proj": seeded(E, H, I, seed=5), "down_scale": None}, ExpertSpec(E, H, I, 2)),
    ],
    ids=["up_first", "interleaved", "strided bias", "strided scale", "float weight"],
)
def test_copies_nothing_is_false_if_one_tensor_is_made(change: dict[str, Any], spec: ExpertSpec) -> None:
    given = canonical_arguments() | change
    assert not copies_nothing(spec, **given)
    packed = pack_experts(spec, **given)
    assert all(tensor.is_contiguous() for tensor in tensors_of(packed).values())


def test_a_block_without_a_gate_has_no_order_to_change() -> None:
    spec = spec_of(False, "interleaved", True, gated=False)
    weights = mxfp8_weights(gated=False)
    assert copies_nothing(
        spec,
        weights["gate_up"],
        weights["down"],
        gate_up_scale=weights["gate_up_scale"],
        down_scale=weights["down_scale"],
    )


# Repacking in place


@flags
def test_repacking_keeps_every_address(transposed: bool, layout: str, up_first: bool, gated: bool) -> None:
    spec = spec_of(transposed, layout, up_first, gated)
    rows = 2 * I if gated else I

    def weights(seed: int) -> tuple[Tensor, ...]:
        shapes = ((E, H, rows), (E, I, H)) if transposed else ((E, rows, H), (E, H, I))
        return tuple(seeded(*shape, seed=seed) for shape in (*shapes, (E, rows)))

    packed = pack_experts(spec, *(w.clone() for w in weights(0)))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(packed).items()}
    repack_into(packed, spec, *weights(1))
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(packed).items()} == addresses
    for name, expected in tensors_of(pack_experts(spec, *weights(1))).items():
        assert_same_bytes(getattr(packed, name), expected)


def test_packed_in_inference_mode_repacks_outside_it() -> None:
    spec = ExpertSpec(E, H, I, 2, up_first=True)
    weights = seeded(E, 2 * I, H, seed=0), seeded(E, H, I, seed=1), seeded(E, 2 * I, seed=2)
    with torch.inference_mode():
        packed = pack_experts(spec, *weights)
    repack_into(packed, spec, *(2 * w for w in weights))
    assert_same_bytes(packed.down, mxfp8.quantize(2 * weights[1])[0])


def test_weights_made_in_inference_mode() -> None:
    spec = ExpertSpec(E, H, I, 2, up_first=True)
    with torch.inference_mode():
        weights = seeded(E, 2 * I, H, seed=0), seeded(E, H, I, seed=1), seeded(E, 2 * I, seed=2)
    packed = pack_experts(spec, *weights)
    repack_into(packed, spec, *weights)
    assert_same_bytes(packed.down, mxfp8.quantize(weights[1])[0])


# Errors

FLOAT = {"gate_up_proj": torch.zeros(E, 2 * I, H), "down_proj": torch.zeros(E, H, I)}
MX = {
    "gate_up_proj": torch.zeros(E, 2 * I, H).to(torch.float8_e4m3fn),
    "down_proj": torch.zeros(E, H, I).to(torch.float8_e4m3fn),
    "gate_up_scale": torch.zeros(E, 2 * I, 2, dtype=torch.uint8),
    "down_scale": torch.zeros(E, H, 2, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (MX | {"down_scale": None}, "down_proj without down_scale: got float8_e4m3fn.* FP8 weights need down_scale"),
        (MX | {"down_proj": FLOAT["down_proj"]}, "down_proj with down_scale: got float32, expected .*float8_e4m3fn"),
        (MX | {"gate_up_scale": torch.zeros(E, 2 * I, 2)}, "gate_up_scale: got float32, expected one of uint8.*E8M0"),
        (MX | {"gate_up_scale": torch.zeros(E, 2 * I, 1, dtype=torch.uint8)}, r"\(3, 66, 1\), expected \(3, 66, 2\)"),
        (MX | {"gate_up_proj": MX["gate_up_proj"].mT}, r"shape \(3, 40, 66\), expected \(3, 66, 40\)"),
        (MX | {"gate_up_proj": MX["gate_up_proj"].view(torch.int8)}, "gate_up_proj with gate_up_scale: got int8"),
        (FLOAT | {"down_proj": torch.zeros(E, I, H)}, r"down_proj: got shape \(3, 33, 40\), expected \(3, 40, 33\)"),
        (FLOAT | {"down_proj": torch.zeros(E, H, I, dtype=torch.int32)}, "down_proj without down_scale: got int32"),
        (FLOAT | {"down_bias": torch.zeros(E, I)}, r"down_bias: got shape \(3, 33\), expected \(3, 40\)"),
        (FLOAT | {"gate_up_bias": torch.zeros(E, 2 * I).int()}, "gate_up_bias: got int32, expected one of float32"),
    ],
)
def test_errors_name_the_tensor_and_the_choices(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExpertInputError, match=message):
        pack_experts(ExpertSpec(E, H, I, 2), **arguments)


def test_transposed_weights_have_their_own_shape() -> None:
    with pytest.raises(
        ExpertInputError, match=r"transposed gate_up_proj: got shape \(3, 66, 40\), expected \(3, 40, 66\)"
    ):
        pack_experts(ExpertSpec(E, H, I, 2, transposed=True), **FLOAT)


def test_a_promised_bias_that_is_missing() -> None:
    with pytest.raises(ExpertInputError, match="has_bias is True, but neither"):
        pack_experts(ExpertSpec(E, H, I, 2, has_bias=True), **FLOAT)


def test_repacking_another_block() -> None:
    packed = pack_experts(ExpertSpec(E, H, I, 2), **FLOAT)
    with pytest.raises(ExpertInputError, match=r"packed.down_bias is absent, but .* float32 \(3, 40\)"):
        repack_into(packed, ExpertSpec(E, H, I, 2), **FLOAT, down_bias=torch.zeros(E, H))
    other = {"gate_up_proj": torch.zeros(E, 2 * I, H + 32), "down_proj": torch.zeros(E, H + 32, I)}
    with pytest.raises(ExpertInputError, match=r"packed.gate_up is float8_e4m3fn \(3, 66, 40\)"):
        repack_into(packed, ExpertSpec(E, H + 32, I, 2), **other)
