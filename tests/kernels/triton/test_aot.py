"""The launches that a call would make, compiled for GPUs that are not here."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from expert_cases import GATES

from moe_compile.kernels.packed import PackedExperts
from moe_compile.kernels.triton.aot import SHARED_MEMORY, compile_launch
from moe_compile.kernels.triton.experts import plan
from moe_compile.kernels.triton.launch import Launch
from moe_compile.spec import GateFunction

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled"
)

ARCHS = [pytest.param(arch, marks=pytest.mark.gfx950) if arch == "gfx950" else arch for arch in SHARED_MEMORY]
M3_TP4, M2 = (6144, 768, 128, 4), (3072, 1536, 256, 8)  # H, I, E, K
PROJECTIONS = {"gate_up_kernel", "down_kernel", "gate_up_slot_kernel", "down_slot_kernel"}


def meta_launches(
    arch: str,
    num_tokens: int,
    model: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    gate: GateFunction = GATES["swiglu_oai"],
    quantized: bool = False,
    bias: bool = False,
    expert_map: bool = False,
) -> list[Launch]:
    """Shapes and dtypes suffice: no launch of a plan depends on what is in a tensor."""
    hidden_size, intermediate_size, num_experts, top_k = model
    rows = 2 * intermediate_size if gate.gated else intermediate_size

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = PackedExperts(
        meta(num_experts, rows, hidden_size, dtype=torch.float8_e4m3fn),
        meta(num_experts, rows, -(-hidden_size // 32), dtype=torch.uint8),
        meta(num_experts, hidden_size, intermediate_size, dtype=torch.float8_e4m3fn),
        meta(num_experts, hidden_size, -(-intermediate_size // 32), dtype=torch.uint8),
        meta(num_experts, rows, dtype=torch.bfloat16) if bias else None,
        meta(num_experts, hidden_size, dtype=torch.bfloat16) if bias else None,
    )
    _, launches = plan(
        meta(num_tokens, hidden_size, dtype=dtype),
        meta(num_tokens, top_k, dtype=torch.int64),
        meta(num_tokens, top_k, dtype=torch.float32),
        packed,
        gate,
        arch,
        meta(4 * num_experts, dtype=torch.int32) if expert_map else None,
        quantized,
    )
    return launches


def assert_fits(launch: Launch, arch: str) -> None:
    compiled = compile_launch(launch, arch)
    assert compiled.shared <= SHARED_MEMORY[arch], f"{compiled.name} on {arch}: {compiled.shared} bytes"
    assert compiled.scratch == 0, f"{compiled.name} on {arch} spills {compiled.scratch} bytes a thread"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_a_call(arch: str) -> None:
    sorted_call = meta_launches(arch, 300, M3_TP4, quantized=True, expert_map=True, bias=True)
    names = [launch.kernel.__name__ for launch in sorted_call]
    assert names == [
        "count_kernel",
        "scan_kernel",
        "place_kernel",
        "quantize_kernel",
        "gate_up_kernel",
        "quantize_kernel",
        "down_kernel",
        "reduce_kernel",
    ]
    unsorted_call = meta_launches(arch, 1, M3_TP4)
    assert [launch.kernel.__name__ for launch in unsorted_call] == ["gate_up_slot_kernel", "down_slot_kernel"]
    with_256_experts = [x for x in meta_launches(arch, 300, M2) if x.kernel.__module__.endswith("routing_kernels")]
    assert len(with_256_experts) == 3
    for launch in (*sorted_call, *unsorted_call, *with_256_experts):
        assert_fits(launch, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("num_tokens", "dtype", "model", "quantized"),
    [
        pytest.param(64, torch.bfloat16, M3_TP4, False, id="bf16-m16"),
        pytest.param(1600, torch.bfloat16, M2, False, id="bf16-m64"),
        pytest.param(4096, torch.bfloat16, M3_TP4, False, id="bf16-m128"),
        pytest.param(4096, torch.bfloat16, M3_TP4, True, id="mxfp8-m32"),
        pytest.param(4096, torch.float16, M3_TP4, False, id="fp16-m64"),
        pytest.param(4096, torch.float32, M3_TP4, False, id="fp32-m32"),
    ],
)
def test_projections(
    num_tokens: int, dtype: torch.dtype, model: tuple[int, int, int, int], quantized: bool, arch: str
) -> None:
    for launch in meta_launches(arch, num_tokens, model, dtype, quantized=quantized):
        if launch.kernel.__name__ in PROJECTIONS:
            assert_fits(launch, arch)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx950", marks=pytest.mark.gfx950)])
@pytest.mark.parametrize("name", ["softcaps", "gelu", "silu_ungated_limit"])
def test_ragged_sizes_and_other_gates(name: str, arch: str) -> None:
    for num_tokens in (4, 40):
        for launch in meta_launches(arch, num_tokens, (100, 40, 3, 3), gate=GATES[name], bias=True):
            if launch.kernel.__name__ in PROJECTIONS:
                assert_fits(launch, arch)


def test_scratch_sees_a_spill() -> None:
    """The check is not blind: tiles twice as large in two directions do spill on sm_90."""
    launch = next(x for x in meta_launches("sm_90", 1600, M2) if x.kernel.__name__ == "gate_up_kernel")
    large = replace(launch, arguments={**launch.arguments, "BLOCK_M": 128, "BLOCK_K": 128})
    assert compile_launch(large, "sm_90").scratch > 0
