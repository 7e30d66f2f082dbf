"""The gate function between the two GEMMs, recognised by evaluating it.

Candidates take their parameters (limits, alpha, offsets) from the constants in the sub-graph; one is accepted only if
it agrees with the sub-graph at every probe of every column. Each column gets probe values of its own, so which column
is gate, which is up, and how the two interleave fall out of the same comparison.

The probes cover magnitudes from 1e-6 to 1e38 of either sign, and each constant of the sub-graph, each product and
quotient of two, with close neighbours, in many combinations. The allowed operators are analytic, or minima and maxima
of such: a function of them that agrees there is the candidate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from moe_compile.passes import gate_region
from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import Unproven
from moe_compile.passes.gate_region import Region
from moe_compile.passes.row_expressions import Mask, Rows
from moe_compile.passes.row_provenance import RowProvenance
from moe_compile.spec import ACTIVATIONS, GateFunction
from moe_compile.torch_internals import real_tensors

_PROBE_ROWS = 64
_PROBES = 16384  # at least; narrow layers take more rows
_RELATIVE = 1e-9
# Of the natural scale (1 + |gate|) * (1 + |U(up)|): the two sides may cancel differently, as 1 + erf(x) does near -1,
# which is over long before -100.
_ABSOLUTE, _CANCELS_UP_TO = 1e-13, 100.0


@dataclass(frozen=True)
class GateMatch:
    """A proven gate function with the layout of the columns that it reads.

    ``linear`` is the projection it starts from, ``bias`` what was added to it, ``masks`` the sentinel masks applied on
    the way, ``interior`` the nodes of the sub-graph.
    """

    linear: ExpertGemm
    gate: GateFunction
    gate_up_layout: str
    up_first: bool
    bias: Rows | None
    masks: tuple[Mask, ...]
    interior: tuple[Node, ...]


@dataclass(frozen=True)
class _Layout:
    """Which columns of the up projection are gate and which are up."""

    name: str
    up_first: bool

    def split(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        if self.name == "concatenated":
            first, second = columns.chunk(2, dim=-1)
        else:
            first, second = columns[..., ::2], columns[..., 1::2]
        return (second, first) if self.up_first else (first, second)


_LAYOUTS = [_Layout(name, up_first) for up_first in (False, True) for name in ("concatenated", "interleaved")]

Found = tuple[GateFunction, _Layout]


def match_gate_function(result: Node, gemms: Mapping[Node, ExpertGemm], provenance: RowProvenance) -> GateMatch:
    """Prove what is computed between a projection in ``gemms`` and ``result``, the down projection's input rows.

    Raises:
        Unproven: the sub-graph holds an operator that is not pointwise, starts from no or several projections, or its
            function is none of the known ones.
    """
    region = gate_region.collect(result, gemms, provenance)
    width, out_width = region.linear.out_features, region.out_width
    if out_width != width and out_width * 2 != width:
        raise Unproven(
            f"{width} columns become {out_width}: neither a gate and an up half nor a plain activation", result
        )
    constants = gate_region.constants(region)
    key = gate_region.signature(region)
    if key not in provenance.memo:
        with real_tensors():
            provenance.memo[key] = _search(region, constants)
    found: Found | None = provenance.memo[key]
    if found is None:
        shown = ", ".join(f"{c:g}" for c in constants) or "none"
        raise Unproven(
            f"the gate function is none of the known ones (operators: {region.operators()}; constants: {shown})", result
        )
    gate, layout = found
    return GateMatch(region.linear, gate, layout.name, layout.up_first, region.bias, region.masks, region.nodes)


def _search(region: Region, constants: list[float]) -> Found | None:
    """The candidate and layout that agree with the region at every probe."""
    width = region.linear.out_features
    inner = 1
    for size in region.inner_sizes:
        inner *= size
    rows = inner * max(_PROBE_ROWS, _PROBES // (width * inner))
    inputs = _probes(constants, rows, width)
    outputs = gate_region.replay(region, inputs)
    if region.out_width == width:
        for gate in _activations(constants):
            if _agrees(gate(inputs), outputs, 1 + inputs.abs().clamp(max=_CANCELS_UP_TO)):
                return gate, _LAYOUTS[0]
        return None
    for layout in _LAYOUTS:
        gate_columns, up_columns = layout.split(inputs)
        for gate in _gated_candidates(region, layout, inputs, constants):
            # One row rejects nearly every wrong candidate.
            if all(
                _agrees(
                    gate(gate_columns[part], up_columns[part]),
                    outputs[part],
                    (1 + gate_columns[part].abs().clamp(max=_CANCELS_UP_TO))
                    * (1 + _up_factor(gate, up_columns[part]).abs()),
                )
                for part in (slice(0, 1), slice(None))
            ):
                return gate, layout
    return None


def _up_factor(gate: GateFunction, up: Tensor) -> Tensor:
    """``U(up)``, as ``relu(1) = 1`` stands for ``A``."""
    alone = GateFunction("relu", limit=gate.limit, up_offset=gate.up_offset, up_softcap=gate.up_softcap)
    return alone(torch.full_like(up, min(1.0, gate.limit or 1.0)), up)


def _probes(constants: list[float], rows: int, columns: int) -> Tensor:
    """(rows, columns) float64 probes; every column holds its own mixture of the special and the spread values."""
    generator = torch.Generator().manual_seed(20260101)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64) * (high - low) + low

    near = [s * (c + d) for c in [0.0, *constants] for d in (-0.5, -1e-4, 0.0, 1e-4, 0.5) for s in (1.0, -1.0)]
    for a, b in itertools.permutations([c for c in constants if c > 0], 2):
        near += [s * derived * (1 + d) for derived in (a * b, a / b) for d in (-1e-4, 0.0, 1e-4) for s in (1.0, -1.0)]
    special = torch.tensor([*near, 12.0, -12.0, -1.0, 2.0, 30.0, -30.0, 300.0, -300.0], dtype=torch.float64)
    kinds = [
        uniform(-30, 30),
        uniform(-3, 3),
        10 ** uniform(-6, 4.5) * uniform(-1, 1).sign(),
        10 ** uniform(4.5, 38) * uniform(-1, 1).sign(),
        special[torch.randint(0, len(special), (rows, columns), generator=generator)],
    ]
    which = torch.randint(0, len(kinds), (rows, columns), generator=generator)
    return torch.stack(kinds).gather(0, which.unsqueeze(0)).squeeze(0)


def _agrees(expected: Tensor, actual: Tensor, scale: Tensor) -> bool:
    error = (expected - actual).abs()
    return bool((error <= _RELATIVE * (expected.abs() + actual.abs()) + _ABSOLUTE * scale).all())


def _activations(constants: list[float]) -> Iterator[GateFunction]:
    """``A`` alone: functions of the gate with parameters among the constants, those without parameters first."""
    positive = [c for c in constants if c > 0]
    limits = [(None, False), *((c, after) for c in positive for after in (False, True))]
    for activation in ACTIVATIONS:
        of_silu = positive if activation == "silu" else []
        alphas, caps = [1.0, *(c for c in of_silu if c != 1.0)], [None, *of_silu]
        for cap, (limit, after), alpha in itertools.product(caps, limits, alphas):
            yield GateFunction(activation, alpha, limit, after, gate_softcap=cap, gated=False)


def _gated_candidates(
    region: Region, layout: _Layout, inputs: Tensor, constants: list[float]
) -> Iterator[GateFunction]:
    """``A(gate) * U(up)`` with each factor proportional to the region when the other's columns are held still.

    This keeps the search to a sum instead of a product of the two factors' parameters.
    """
    still = 0.6180339887  # no limit or cap above it changes it, and no likely offset makes it zero

    def varied(which: int) -> tuple[Tensor, Tensor]:
        """The values that one factor's first column takes, and the region's first output for them."""
        held = inputs.clone()
        layout.split(held)[1 - which].fill_(still)
        values, outputs = layout.split(held)[which][:, 0], gate_region.replay(region, held)[:, 0]
        near = values.abs() <= 1e3  # where cancellation is small beside the largest output
        return values[near], outputs[near]

    gate_values, gate_outputs = varied(0)
    factors = [gate for gate in _activations(constants) if _proportional(gate(gate_values), gate_outputs)]
    if not factors:
        return
    up_values, up_outputs = varied(1)
    ones = torch.ones_like(up_values)
    positive = [c for c in constants if c > 0]
    # 1 may not be there: f(g) * u + f(g)
    offsets = [0.0, 1.0, *positive, *(-c for c in positive)]
    for limit, cap, offset in itertools.product([None, *positive], [None, *positive], offsets):
        # relu(1) = 1 as A, so this is U up to a factor
        up_alone = GateFunction("relu", limit=limit, up_offset=offset, up_softcap=cap)
        if not _proportional(up_alone(ones, up_values), up_outputs):
            continue
        for gate in factors:
            # A limit that clips nothing of one factor may be absent from it, so every pairing is tried
            for both in {gate.limit, limit}:
                after = gate.limit_after and both is not None
                yield GateFunction(gate.activation, gate.alpha, both, after, offset, gate.gate_softcap, cap)


def _proportional(expected: Tensor, actual: Tensor) -> bool:
    """Whether the two vectors differ by one factor; a coarse test, as those that pass are compared in full."""
    at = actual.abs().argmax()
    left, right = expected * actual[at], actual * expected[at]
    return bool(((left - right).abs() <= 1e-7 * (left.abs() + right.abs()) + 1e-9).all()) and bool(actual[at] != 0)
