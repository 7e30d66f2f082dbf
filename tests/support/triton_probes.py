# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The device functions of kernels/triton, each alone in a kernel, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.kernels.triton import quantize_kernels
from moe_compile.kernels.triton.decode import decode_columns, decode_rows, e4m3_to_f16, relative_scales, round_to
from moe_compile.kernels.triton.gate import apply_gate, gate_constants
from moe_compile.kernels.triton.launch import Launch, execute
from moe_compile.spec import GateFunction


@triton.jit
def decode_kernel(f32_ptr, bf16_ptr, columns_ptr):
    """Row s of each output: all 256 elements under the scale byte s."""
    scale_byte = tl.program_id(0)
    element = tl.arange(0, 256)
    decoded = decode_rows(element[None, :].to(tl.uint8), tl.full((1, 8), scale_byte, tl.uint8), 1, 256)
    tl.store(f32_ptr + scale_byte * 256 + element[None, :], decoded)
    tl.store(bf16_ptr + scale_byte * 256 + element[None, :], round_to(decoded, tl.bfloat16))
    decoded = decode_columns(element[:, None].to(tl.uint8), tl.full((8, 1), scale_byte, tl.uint8), 256, 1)
    tl.store(columns_ptr + scale_byte * 256 + element[:, None], decoded)


def decode_everything(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All elements (columns) under all scales (rows), (256, 256): by rows as float32 and bfloat16, and by columns."""
    f32, columns = (torch.empty((256, 256), device=device) for _ in range(2))
    bf16 = torch.empty((256, 256), device=device, dtype=torch.bfloat16)
    arguments = {"f32_ptr": f32, "bf16_ptr": bf16, "columns_ptr": columns}
    execute([Launch(decode_kernel, (256,), arguments)], f32.device)
    return f32, bf16, columns


@triton.jit
def half_kernel(f16_ptr, scale_ptr):
    """All 256 elements; and row b of the scales: byte b relative to all bases."""
    byte = tl.program_id(0)
    element = tl.arange(0, 256)
    tl.store(f16_ptr + element, e4m3_to_f16(element.to(tl.uint8), False))
    scale = relative_scales(tl.full((1, 256), byte, tl.uint8), (22 - element)[None, :], False)
    tl.store(scale_ptr + byte * 256 + element[None, :], scale)


def decode_half(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(256,) elements and (256 bytes, 256 bases) scales relative to a base, both float16."""
    f16 = torch.empty(256, dtype=torch.float16, device=device)
    scale = torch.empty((256, 256), dtype=torch.float16, device=device)
    execute([Launch(half_kernel, (256,), {"f16_ptr": f16, "scale_ptr": scale})], f16.device)
    return f16, scale


def every_element_and_scale(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What `decode_everything` decodes: (256, 256) float8_e4m3fn and (256, 8) uint8."""
    byte = torch.arange(256, device=device).to(torch.uint8)
    return byte.repeat(256, 1).view(torch.float8_e4m3fn), byte[:, None].repeat(1, 8)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) by the quantize_kernel: element and scale bytes, uint8."""
    rows, k = x.shape
    values = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, -(-k // 32)), dtype=torch.uint8, device=x.device)
    arguments = {"x_ptr": x, "values_ptr": values, "scales_ptr": scales, "K": k, "BLOCKS": 2}
    execute([Launch(quantize_kernels.quantize_kernel, (rows, -(-k // 64)), arguments)], x.device)
    return values, scales


def hard_to_quantize(dtype: torch.dtype, k: int, device: str = "cpu") -> torch.Tensor:
    """(N, K): every magnitude, ties, the scale's own boundaries, signed zeros, subnormals, NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, k, generator=generator)
    info = torch.finfo(dtype)
    x *= torch.logspace(-38, 37, 24, base=10).clamp(info.smallest_normal, info.max / 8)[:, None]
    ties = (torch.arange(k) % 128 + 0.5) * 2.0**-4
    boundary = torch.full((k,), 448.0) * 2.0 ** (torch.arange(k) % 5 - 2)
    above = boundary * (1 + 2.0**-7)
    subnormal = torch.arange(k) * float(torch.finfo(dtype).smallest_normal) / 64
    zeros = torch.zeros(k).copysign(torch.randn(k, generator=generator))
    poisoned = torch.randn(2, k, generator=generator)
    poisoned[0, 1], poisoned[1, k - 1] = torch.nan, -torch.inf
    rows = torch.stack([ties, boundary, above, -subnormal, subnormal * 2.0**-20, zeros])
    return torch.cat([x, rows, poisoned]).to(dtype).to(device)


@triton.jit
def gate_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    count,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr,
    UP_SOFTCAP: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + i, mask=i < count, other=0.0)
    up = tl.load(up_ptr + i, mask=i < count, other=0.0)
    out = apply_gate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_SOFTCAP, UP_SOFTCAP)
    tl.store(out_ptr + i, out, mask=i < count)


def evaluate_gate(function: GateFunction, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``function(gate, up)`` on the device, float32 (N,); up is not looked at without a gate."""
    out = torch.empty_like(gate)
    arguments = {"gate_ptr": gate, "up_ptr": up, "out_ptr": out, "count": gate.numel(), "BLOCK": 256}
    launch = Launch(gate_kernel, (-(-gate.numel() // 256),), {**arguments, **gate_constants(function)})
    execute([launch], gate.device)
    return out
