"""Whole expert blocks by the FlyDSL kernels, compiled for gfx950 and executed in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flydsl_emulated import Emulator, resources
from flydsl_gfx950 import flydsl_target

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import mxfp8, reference
from moe_compile.kernels.flydsl import experts, launch
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

pytestmark = pytest.mark.gfx950

OAI = GateFunction("silu", alpha=1.702, limit=7.0, up_offset=1.0)


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    found = Emulator()
    monkeypatch.setattr(launch, "execute", found.execute)
    with flydsl_target(tmp_path):
        yield found


def block(num_experts: int, hidden: int, intermediate: int) -> PackedExperts:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) * 0.1
    down = torch.randn(num_experts, hidden, intermediate, generator=generator) * 0.1
    return PackedExperts(*mxfp8.quantize(gate_up), *mxfp8.quantize(down))


# (tokens, top-k, experts, H, I, gate): unsorted and sorted slots, K with and without a rest of 128, ragged tiles.
CASES = [
    (1, 2, 4, 160, 96, GateFunction("silu")),
    (2, 3, 5, 32, 32, GateFunction("silu", limit=0.5, limit_after=True)),
    (16, 2, 3, 32, 32, GateFunction("silu", limit=0.5)),
    (17, 2, 4, 160, 96, OAI),
    (64, 2, 3, 128, 64, OAI),
]


@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "hidden", "intermediate", "gate"), CASES)
def test_against_the_reference(
    emulator: Emulator, tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, gate: GateFunction
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    # Expert 1 gets nothing; -1 and E name no expert.
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator)
    ids[ids == 1] = num_experts
    ids[0, 0] = 0
    weights = torch.rand(tokens, top_k, generator=generator)
    packed = block(num_experts, hidden, intermediate)

    out = experts.experts(x, ids, weights, packed, gate)

    exact = reference.experts(
        x.double(), ids, weights.double(), packed, gate, activations="mxfp8", out_dtype=torch.float64
    )
    assert exact.norm() > 0
    assert (out.double() - exact).norm() <= 2e-3 * exact.norm()
    nowhere = ((ids < 0) | (ids >= num_experts)).all(1)
    assert not out[nowhere].any()
    assert emulator.scaled_mfma > 0
    assert emulator.launched == ["quantize", "gate_up", "down", "reduce"]
    for image in emulator.images.values():
        found = resources(image)
        assert found[".vgpr_spill_count"] == found[".sgpr_spill_count"] == found[".private_segment_fixed_size"] == 0
        assert found[".group_segment_fixed_size"] == 0


def test_no_tokens_launch_nothing(emulator: Emulator) -> None:
    out = experts.experts(torch.empty(0, 32), torch.empty(0, 2).int(), torch.empty(0, 2), block(2, 32, 32), OAI)
    assert out.shape == (0, 32)
    assert not emulator.launched


def test_what_cannot_run_is_refused(emulator: Emulator) -> None:
    arguments = (torch.zeros(1, 32), torch.zeros(1, 1).int(), torch.ones(1, 1), block(2, 32, 32))
    with pytest.raises(ExpertInputError, match="silu only, not gelu"):
        experts.experts(*arguments, GateFunction("gelu"))
    with pytest.raises(ExpertInputError, match="activations='bf16' is not possible"):
        experts.experts(*arguments, OAI, activations="bf16")
    assert not emulator.launched
