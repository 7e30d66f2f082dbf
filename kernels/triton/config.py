"""Tile sizes: a pure function of sizes, dtype and architecture. Nothing is measured at run time.

The host knows only how many slots there are (S = T * K), not how they fall on the experts, so the rules look at the
mean number of slots per expert that has any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# float32 hidden states: up to this many slots each slot is a matrix-vector product of its own.
MAX_UNSORTED_SLOTS = 64


@dataclass(frozen=True)
class Tiles:
    """What one program computes: ``block_n`` weight rows over ``block_k`` columns at a time, of one part of K."""

    block_n: int
    block_k: int  # a power of two and a multiple of 32, the block size of MXFP8
    num_warps: int
    num_stages: int
    split_k: int = 1  # parts of K, summed by the kernel that follows

    def __str__(self) -> str:
        """``n64k256w2s3x4``"""
        split = f"x{self.split_k}" if self.split_k > 1 else ""
        return f"n{self.block_n}k{self.block_k}w{self.num_warps}s{self.num_stages}{split}"


@dataclass(frozen=True)
class Config:
    """``block_m`` is the number of sorted slots of a program, or None where slots are not sorted.

    ``tail``: for what is left of an expert behind whole blocks, if it is no more than the tail's ``block_m``. Tails
    write into the results of the blocks, so neither splits K.
    """

    block_m: int | None
    gate_up: Tiles
    down: Tiles
    tail: Config | None = None

    def __str__(self) -> str:
        """``m64 gate_up n64k128w4s3 down n64k128w4s3``"""
        block_m = "unsorted" if self.block_m is None else f"m{self.block_m}"
        tail = "" if self.tail is None else f" tail {self.tail}"
        return f"{block_m} gate_up {self.gate_up} down {self.down}{tail}"


def choose_config(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, dot: str, arch: str
) -> Config:
    """The configuration of one expert block.

    Args:
        num_tokens, top_k, num_experts, hidden_size, intermediate_size: T, K, E (of the weights), H, I; all >= 1.
        dot: ``half`` (half_gemm) or ``fp32`` (slot_kernels and gemm_kernels).
        arch: as `Target.arch` names it; anything that is not AMD's (gfx...) is treated as NVIDIA.
    """
    slots = num_tokens * top_k
    if dot == "fp32" and slots <= MAX_UNSORTED_SLOTS:
        return Config(None, _vector_tiles(hidden_size), _vector_tiles(intermediate_size))
    occupied = min(slots, num_experts)
    mean = -(-slots // occupied)
    if dot == "fp32":
        block_m = min(max(_power_of_two(mean), 16), 32)
        return Config(block_m, _float32_tiles(), _float32_tiles())

    def half(block_m: int, split: bool = True) -> Config:
        first = _half_tiles(block_m, occupied, 2 * intermediate_size, hidden_size, arch, split)
        return Config(block_m, first, _half_tiles(block_m, occupied, hidden_size, intermediate_size, arch, split))

    # Slots fall on experts at random, so most experts have no more than the mean and two standard deviations (of a
    # Poisson distribution). One block for those: a second one would decode the weights again.
    most = mean + 2 * math.isqrt(mean)
    if most <= 64:
        return half(max(_power_of_two(most), 16))
    if mean < 128:
        return replace(half(64), tail=half(16, split=False))
    return replace(half(128), tail=half(32, split=False))


def _vector_tiles(k: int) -> Tiles:
    # 16 rows of 256 bytes: 32 bytes a thread, two float32 accumulators of 32 registers in gate_up.
    return Tiles(block_n=16, block_k=min(max(_power_of_two(k), 32), 256), num_warps=4, num_stages=2)


def _float32_tiles() -> Tiles:
    # 8 warps: with 4, gate_up spills 16 bytes a thread on sm_90.
    return Tiles(block_n=32, block_k=32, num_warps=8, num_stages=2)


def _half_tiles(block_m: int, occupied: int, n: int, k: int, arch: str, split: bool) -> Tiles:
    amd = arch.startswith("gfx")
    if block_m >= 64:
        if arch == "sm_90":
            block_n, block_k, num_warps, stages = (128, 128, 4, 3) if block_m == 64 else (128, 64, 4, 3)
        else:
            block_n, block_k, num_warps, stages = 128, 64, 8, 2
        return Tiles(block_n, _largest_divisor(k, block_k), num_warps, stages)
    # Few programs do not fill the memory system: at least three of them for each of 132 multiprocessors, and if K is
    # split at all, six (M3 TP4, T = 1, gate_up: 18.5 us in 1 part, 15.5 in 4, 14.9 in 8).
    split_k, programs = 1, occupied * -(-n // 64)
    while split and split_k < 8 and programs * split_k < (384 if split_k == 1 else 768) and k >= 768 * split_k * 2:
        split_k *= 2
    # Long steps mean fewer instructions; short ones keep more copies ahead where a multiprocessor has few programs.
    long = k > 1024 and programs * split_k > 512 and not amd
    block_k = _largest_divisor(k // split_k, 256 if long else 128)
    stages = 2 if amd or (block_k == 256 and k > 2048) else 3 if block_k == 256 else 4
    # sm_80 decodes in software, and spills with 2 warps.
    return Tiles(64, block_k, 2 if amd or converts_e4m3(arch) else 4, stages, split_k)


def converts_e4m3(arch: str) -> bool:
    """Whether the hardware converts E4M3 (fn) to float16: NVIDIA since sm_89."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89


def _largest_divisor(k: int, limit: int) -> int:
    """The largest power of two in 32..limit that divides k; 32 if none does."""
    while limit > 32 and k % limit:
        limit //= 2
    return limit


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
