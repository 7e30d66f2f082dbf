"""Tile sizes: a pure function of sizes, dtype and architecture. Nothing is measured at run time.

The host knows only how many slots there are (S = T * K), not how they fall on the experts, so the rule looks at the
mean number of slots per expert that has any.
"""

from __future__ import annotations

from dataclasses import dataclass

# Up to this many slots each slot is a matrix-vector product of its own. Beyond, experts are shared by several slots
# often enough that reading weights once per slot costs more than sorting.
MAX_UNSORTED_SLOTS = 64

LARGEST_BLOCK_M = {"bf16": 128, "mxfp8": 32, "fp16": 64, "fp32": 32}


@dataclass(frozen=True)
class Tiles:
    """What one program computes: ``block_n`` weight rows over ``block_k`` columns at a time."""

    block_n: int
    block_k: int  # a power of two and a multiple of 32, the block size of MXFP8
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """``block_m`` is the number of sorted slots of a program, or None where slots are not sorted."""

    block_m: int | None
    gate_up: Tiles
    down: Tiles

    def __str__(self) -> str:
        """``m64 gate_up n64k128w4s3 down n64k128w4s3``"""
        tiles = [f"n{t.block_n}k{t.block_k}w{t.num_warps}s{t.num_stages}" for t in (self.gate_up, self.down)]
        return f"{'unsorted' if self.block_m is None else f'm{self.block_m}'} gate_up {tiles[0]} down {tiles[1]}"


def choose_config(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, dot: str, arch: str
) -> Config:
    """The configuration of one expert block.

    Args:
        num_tokens, top_k, num_experts, hidden_size, intermediate_size: T, K, E (of the weights), H, I; all >= 1.
        dot: ``bf16``, ``fp16`` or ``fp32``, see gemm_kernels; ``mxfp8`` is bf16 with activations decoded as well.
        arch: as `Target.arch` names it; anything that is not AMD's (gfx...) is treated as NVIDIA.
    """
    slots = num_tokens * top_k
    if slots <= MAX_UNSORTED_SLOTS:
        return Config(None, _vector_tiles(hidden_size), _vector_tiles(intermediate_size))
    block_m = min(max(_power_of_two(slots // min(slots, num_experts)), 16), LARGEST_BLOCK_M[dot])
    return Config(
        block_m, _matrix_tiles(block_m, hidden_size, dot, arch), _matrix_tiles(block_m, intermediate_size, dot, arch)
    )


def _vector_tiles(k: int) -> Tiles:
    # 16 rows of 256 bytes: 32 bytes a thread, two float32 accumulators of 32 registers in gate_up.
    return Tiles(block_n=16, block_k=min(max(_power_of_two(k), 32), 256), num_warps=4, num_stages=2)


def _matrix_tiles(block_m: int, k: int, dot: str, arch: str) -> Tiles:
    # The compilers' reports for gfx942, gfx950, sm_80, sm_90 and sm_100 bound these: no register spills to memory
    # with Triton 3.6, 3.7 and 3.9 (gate_up at m64 k128 with 4 warps: 248 bytes a thread on sm_90; fp32 the same: 16;
    # mxfp8 at m16 k128: 416 on sm_80, 8 on sm_100; mxfp8 at m128 k64: 704 on sm_80), and 64 KiB of LDS on gfx942.
    stages = 2 if arch.startswith("gfx") else 3
    if dot == "fp16":
        return Tiles(block_n=64, block_k=32, num_warps=4, num_stages=stages)
    if dot == "fp32":
        return Tiles(block_n=32, block_k=32, num_warps=8, num_stages=2)
    block_k = min(max(_power_of_two(k), 32), 128 if block_m <= 32 and dot == "bf16" else 64)
    return Tiles(block_n=64, block_k=block_k, num_warps=8 if block_m == 128 else 4, num_stages=stages)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
