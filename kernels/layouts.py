"""From the weights a model has to the one format the kernels read (`PackedExperts`).

Every layout that `ExpertSpec` names (transposed, interleaved, up first, not gated) is a strided view of the canonical
one: gate rows, then up rows, K last. So packing copies or quantises views, and never makes a re-ordered copy of a whole
weight. Two kinds of weight are taken:

- float, in the layout of the spec: quantised to MXFP8 along the contracted dimension, one expert at a time;
- MXFP8 with scales, always K last (``spec.transposed`` does not apply): the bytes are re-ordered, never re-quantised,
  and not even copied if they are canonical already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import mxfp8
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import ExpertSpec

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ELEMENT_DTYPES = (torch.float8_e4m3fn, torch.uint8)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class _Source:
    """One input as views whose rows (dimension 1), one view after the other, are in canonical order."""

    parts: tuple[Tensor, ...]

    @property
    def shared(self) -> Tensor | None:
        """The input itself if its bytes are canonical, so that its storage can be used."""
        return self.parts[0] if len(self.parts) == 1 and self.parts[0].is_contiguous() else None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (first.shape[0], sum(part.shape[1] for part in self.parts), *first.shape[2:])

    def target(self) -> Tensor:
        """Memory for the canonical bytes."""
        if self.shared is not None:
            return self.shared
        return torch.empty(self.shape, dtype=self.parts[0].dtype, device=self.parts[0].device)

    def rows_of(self, target: Tensor) -> tuple[Tensor, ...]:
        """The rows of ``target`` that belong to each part."""
        return torch.split(target, [part.shape[1] for part in self.parts], dim=1)

    def copy_into(self, target: Tensor) -> None:
        # Not even a copy onto itself: it would raise the `_version` of the model's weight, which asks for a repack.
        if self.shared is not None and self.shared.data_ptr() == target.data_ptr():
            return
        for rows, part in zip(self.rows_of(target), self.parts, strict=True):
            rows.copy_(part)


@dataclass(frozen=True)
class _Weight:
    """Float values without scales, or E4M3 values with E8M0 scales."""

    values: _Source
    scales: _Source | None

    @property
    def all_shared(self) -> bool:
        return self.scales is not None and self.values.shared is not None and self.scales.shared is not None

    def target(self) -> tuple[Tensor, Tensor]:
        if self.scales is not None:
            return self.values.target(), self.scales.target()
        *rows, k = self.values.shape
        device = self.values.parts[0].device
        return (
            torch.empty((*rows, k), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((*rows, mxfp8.scale_count(k)), dtype=torch.uint8, device=device),
        )

    def write_into(self, values: Tensor, scales: Tensor) -> None:
        if self.scales is not None:
            self.values.copy_into(values)
            self.scales.copy_into(scales)
            return
        targets = zip(self.values.rows_of(values), self.values.rows_of(scales), strict=True)
        for part, target in zip(self.values.parts, targets, strict=True):
            mxfp8.quantize_experts(part, out=target)


@dataclass(frozen=True)
class _Sources:
    gate_up: _Weight
    down: _Weight
    gate_up_bias: _Source | None
    down_bias: _Source | None

    @property
    def all_shared(self) -> bool:
        biases = (self.gate_up_bias, self.down_bias)
        return (
            self.gate_up.all_shared
            and self.down.all_shared
            and all(bias is None or bias.shared is not None for bias in biases)
        )

    def target(self) -> PackedExperts:
        return PackedExperts(
            *self.gate_up.target(),
            *self.down.target(),
            None if self.gate_up_bias is None else self.gate_up_bias.target(),
            None if self.down_bias is None else self.down_bias.target(),
        )

    def write_into(self, packed: PackedExperts) -> None:
        self.gate_up.write_into(packed.gate_up, packed.gate_up_scale)
        self.down.write_into(packed.down, packed.down_scale)
        if self.gate_up_bias is not None and packed.gate_up_bias is not None:
            self.gate_up_bias.copy_into(packed.gate_up_bias)
        if self.down_bias is not None and packed.down_bias is not None:
            self.down_bias.copy_into(packed.down_bias)


def pack_experts(
    spec: ExpertSpec,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> PackedExperts:
    """Pack one block's weights.

    Args:
        spec: sizes and layout. E is the number of experts in the weights (under expert parallelism, the local ones).
        gate_up_proj: float32, bfloat16, float16 or float64 (E, 2I, H), or (E, H, 2I) if ``spec.transposed``; with
            scales always (E, 2I, H), float8_e4m3fn or the same bytes as uint8. Without a gate, I instead of 2I.
        down_proj: float (E, H, I), or (E, I, H) if ``spec.transposed``; with scales always (E, H, I).
        gate_up_bias: (E, 2I), any float dtype, in the order of the rows of ``gate_up_proj``.
        down_bias: (E, H), any float dtype.
        gate_up_scale: (E, 2I, ceil(H/32)), uint8 or float8_e8m0fnu, in the order of the rows of ``gate_up_proj``.
        down_scale: (E, H, ceil(I/32)), likewise.

    Returns:
        Canonical weights on the inputs' device. MXFP8 weights and biases that are canonical already share the inputs'
        storage, as new tensor objects: a cache of the result does not keep the inputs' own objects alive.

    Raises:
        ExpertInputError: a tensor is missing, or has a dtype or a shape that the spec does not allow.
    """
    sources = _sources(spec, gate_up_proj, down_proj, gate_up_bias, down_bias, gate_up_scale, down_scale)
    # Tensors made in inference mode could not be repacked in place outside it.
    with torch.inference_mode(False), torch.no_grad():
        packed = sources.target()
        sources.write_into(packed)
    return packed


def repack_into(
    packed: PackedExperts,
    spec: ExpertSpec,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> None:
    """`pack_experts` into existing memory: every tensor of ``packed`` keeps its address, which captured graphs read.

    A tensor of ``packed`` that shares its storage with the input has the new values already and is not touched.

    Raises:
        ExpertInputError: as `pack_experts`, or ``packed`` was made from inputs of other shapes or dtypes.
    """
    sources = _sources(spec, gate_up_proj, down_proj, gate_up_bias, down_bias, gate_up_scale, down_scale)
    with torch.inference_mode(False), torch.no_grad():
        _check_target(packed, sources)
        sources.write_into(packed)


def copies_nothing(
    spec: ExpertSpec,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> bool:
    """Whether `pack_experts` of the same arguments would share the storage of every input.

    A cache must not hold such a result: it would keep the model's own memory alive.

    Raises:
        ExpertInputError: as `pack_experts`.
    """
    return _sources(spec, gate_up_proj, down_proj, gate_up_bias, down_bias, gate_up_scale, down_scale).all_shared


def _sources(
    spec: ExpertSpec,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> _Sources:
    """Check every input and bring its rows into canonical order."""
    e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
    gated = spec.gate.gated
    rows = 2 * i if gated else i
    if spec.has_bias and gate_up_bias is None and down_bias is None:
        raise ExpertInputError("spec.has_bias is True, but neither gate_up_bias nor down_bias is given")
    return _Sources(
        _weight(spec, "gate_up", gate_up_proj, gate_up_scale, (e, rows, h), gate_and_up=gated),
        _weight(spec, "down", down_proj, down_scale, (e, h, i), gate_and_up=False),
        _bias(spec, "gate_up_bias", gate_up_bias, (e, rows), gate_and_up=gated),
        _bias(spec, "down_bias", down_bias, (e, h), gate_and_up=False),
    )


def _weight(
    spec: ExpertSpec, name: str, weight: Tensor, scale: Tensor | None, shape: tuple[int, int, int], *, gate_and_up: bool
) -> _Weight:
    weight = weight.detach()
    if scale is None:
        hint = f"; FP8 weights need {name}_scale" if weight.itemsize == 1 else ""
        _check_dtype(f"{name}_proj without {name}_scale", weight, _FLOAT_DTYPES, hint)
        if spec.transposed:
            _check_shape(f"transposed {name}_proj", weight, (shape[0], shape[2], shape[1]))
            weight = weight.transpose(1, 2)
        _check_shape(f"{name}_proj", weight, shape)
        return _Weight(_source(spec, weight, gate_and_up), None)
    _check_dtype(f"{name}_proj with {name}_scale", weight, _ELEMENT_DTYPES, " (MXFP8 elements)")
    _check_dtype(f"{name}_scale", scale, _SCALE_DTYPES, f" (E8M0 bytes, one per {mxfp8.BLOCK_SIZE} elements)")
    _check_shape(f"{name}_proj with {name}_scale", weight, shape)
    _check_shape(f"{name}_scale", scale, (shape[0], shape[1], mxfp8.scale_count(shape[2])))
    return _Weight(
        _source(spec, weight.view(torch.float8_e4m3fn), gate_and_up),
        _source(spec, scale.detach().view(torch.uint8), gate_and_up),
    )


def _bias(
    spec: ExpertSpec, name: str, bias: Tensor | None, shape: tuple[int, int], *, gate_and_up: bool
) -> _Source | None:
    if bias is None:
        return None
    _check_dtype(name, bias, _FLOAT_DTYPES)
    _check_shape(name, bias, shape)
    return _source(spec, bias.detach(), gate_and_up)


def _source(spec: ExpertSpec, tensor: Tensor, gate_and_up: bool) -> _Source:
    """Gate rows and then up rows of ``tensor`` (dimension 1)."""
    if not gate_and_up or (spec.gate_up_layout == "concatenated" and not spec.up_first):
        return _Source((tensor,))
    if spec.gate_up_layout == "interleaved":
        first, second = tensor[:, 0::2], tensor[:, 1::2]
    else:
        first, second = tensor.chunk(2, dim=1)
    return _Source((second, first) if spec.up_first else (first, second))


def _check_target(packed: PackedExperts, sources: _Sources) -> None:
    """``packed`` has the tensors that packing ``sources`` would give."""
    expected: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {}
    for name, weight in (("gate_up", sources.gate_up), ("down", sources.down)):
        *rows, k = weight.values.shape
        expected[name] = ((*rows, k), torch.float8_e4m3fn)
        expected[f"{name}_scale"] = ((*rows, mxfp8.scale_count(k)), torch.uint8)
    for name, bias in (("gate_up_bias", sources.gate_up_bias), ("down_bias", sources.down_bias)):
        expected[name] = None if bias is None else (bias.shape, bias.parts[0].dtype)
    for name, want in expected.items():
        tensor: Tensor | None = getattr(packed, name)
        got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if got != want:
            raise ExpertInputError(f"packed.{name} is {_describe(got)}, but these weights pack to {_describe(want)}")


def _check_dtype(what: str, tensor: Tensor, choices: tuple[torch.dtype, ...], hint: str = "") -> None:
    if tensor.dtype not in choices:
        names = ", ".join(map(_name, choices))
        raise ExpertInputError(f"{what}: got {_name(tensor.dtype)}, expected one of {names}{hint}")


def _check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ExpertInputError(f"{what}: got shape {tuple(tensor.shape)}, expected {shape}")


def _describe(shape_and_dtype: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if shape_and_dtype is None else f"{_name(shape_and_dtype[1])} {shape_and_dtype[0]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
