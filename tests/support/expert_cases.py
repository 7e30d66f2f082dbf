"""Expert blocks with known answers, for every kernel that takes `PackedExperts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_compile.kernels import reference
from moe_compile.kernels.packed import PackedExperts
from moe_compile.spec import GateFunction

# One of each known family, and between them every field of GateFunction.
GATES = {
    "silu": GateFunction(),
    "swiglu_oai": GateFunction(alpha=1.702, limit=7.0, up_offset=1.0),
    "silu_limit": GateFunction(limit=2.0),
    "silu_limit_after": GateFunction(limit=2.0, limit_after=True),
    "softcaps": GateFunction(gate_softcap=4.0, up_softcap=25.0),
    "gelu": GateFunction("gelu"),
    "gelu_tanh": GateFunction("gelu_tanh"),
    "relu": GateFunction("relu", limit=1.5, limit_after=True, up_offset=0.5),
    "relu2_ungated": GateFunction("relu2", gated=False),
    "silu_ungated_limit": GateFunction(limit=1.0, gated=False),
}

# Relative L2 error against the oracle in float64, rounded once to the dtype of the result. Nearly all elements agree in
# every bit; float32 sums put a few on the other side of a tie, one unit in the last place (2**-7 in bfloat16) away.
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 4e-4, torch.float32: 2e-6}
# A tie between two E4M3 values is a step of up to 1/8, of an element that may be anywhere; seldom, but at real sizes.
QUANTISED_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 1e-3, torch.float32: 1e-3}


@dataclass(frozen=True)
class Block:
    """The arguments of `experts`."""

    hidden_states: torch.Tensor  # (T, H)
    topk_ids: torch.Tensor  # (T, K)
    topk_weights: torch.Tensor  # (T, K)
    packed: PackedExperts
    gate: GateFunction
    expert_map: torch.Tensor | None = None

    def run(self, experts: Callable[..., torch.Tensor], **options: object) -> torch.Tensor:
        arguments = (self.hidden_states, self.topk_ids, self.topk_weights, self.packed, self.gate)
        return experts(*arguments, expert_map=self.expert_map, **options)

    def expected(self, activations: str = "bf16") -> torch.Tensor:
        """The oracle's answer in float64, not rounded at the end."""
        return self.run(
            reference.experts,
            activations=activations,
            out_dtype=torch.float64,
            compute_dtype=torch.float64,
            evaluation="occurring",
        )


def random_packed(
    num_experts: int, hidden_size: int, intermediate_size: int, gated: bool, bias: bool, generator: torch.Generator
) -> PackedExperts:
    """Random bytes whose dequantised rows have a norm near 1; no NaN."""
    device = generator.device

    def weight(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty((num_experts, rows, k), dtype=torch.uint8, device=device)
        for expert in range(num_experts):  # one at a time: nothing wider than a byte is made of the whole weight
            # Signs at random, magnitudes from 2**-3 to below 2**5, 8 codes a power of two: about 8 on average.
            values[expert] = torch.randint(32, 96, (rows, k), generator=generator, device=device, dtype=torch.uint8)
            sign = torch.randint(0, 2, (rows, k), generator=generator, device=device, dtype=torch.uint8)
            values[expert] += 128 * sign
        scale = 127 - 3 - round(torch.tensor(float(k)).log2().item() / 2)
        shape = (num_experts, rows, -(-k // 32))
        scales = torch.randint(scale - 1, scale + 2, shape, generator=generator, device=device, dtype=torch.uint8)
        return values.view(torch.float8_e4m3fn), scales

    rows = 2 * intermediate_size if gated else intermediate_size
    gate_up, gate_up_scale = weight(rows, hidden_size)
    down, down_scale = weight(hidden_size, intermediate_size)
    gate_up_bias = down_bias = None
    if bias:
        gate_up_bias = torch.randn((num_experts, rows), generator=generator, device=device) / 4
        down_bias = (torch.randn((num_experts, hidden_size), generator=generator, device=device) / 4).bfloat16()
    return PackedExperts(gate_up, gate_up_scale, down, down_scale, gate_up_bias, down_bias)


def random_ids(num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """(T, K) int64, distinct within a row where there are enough experts."""
    scores = torch.rand((num_tokens, max(num_experts, top_k)), generator=generator, device=generator.device)
    return scores.argsort(dim=-1)[:, :top_k] % num_experts


def random_block(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    gate: GateFunction = GATES["swiglu_oai"],
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Block:
    """Everything random; routing weights float32, summing to one over a token."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = random_packed(num_experts, hidden_size, intermediate_size, gate.gated, bias, generator)
    hidden_states = torch.randn((num_tokens, hidden_size), generator=generator, device=device).to(dtype)
    topk_weights = torch.rand((num_tokens, top_k), generator=generator, device=device).softmax(-1)
    return Block(hidden_states, random_ids(num_tokens, top_k, num_experts, generator), topk_weights, packed, gate)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in the L2 norm."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def assert_matches_oracle(block: Block, actual: torch.Tensor, activations: str = "bf16") -> None:
    expected = block.expected(activations)
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    error = relative_error(actual, expected.to(actual.dtype))
    tolerance = (TOLERANCE if activations == "bf16" else QUANTISED_TOLERANCE)[actual.dtype]
    assert error <= tolerance, f"relative L2 error {error:.2e} > {tolerance:.0e}"
