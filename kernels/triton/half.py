"""The launches of an expert block in float16 (see half_gemm), for bfloat16 and float16 hidden states.

::

    topk_ids, hidden (T, H) -> prepare_kernel -> sorted slots, hidden in float16
    -> half_gemm_kernel -> gate and up (SPLIT_K, S, 2I) float32 -> activate_kernel -> intermediate (S, I) in float16
    -> half_gemm_kernel -> partials (SPLIT_K, S, H) float32 -> sum_kernel -> out (T, H)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from moe_compile.kernels.packed import PackedExperts
from moe_compile.kernels.triton import half_gemm, half_kernels
from moe_compile.kernels.triton.config import Config, Tiles, converts_e4m3
from moe_compile.kernels.triton.gate import gate_constants
from moe_compile.kernels.triton.launch import Launch
from moe_compile.kernels.triton.routing import (
    MAX_SLOTS_OF_ONE_LAUNCH,
    empty_tables,
    sort_arguments,
    sort_many_slots,
)
from moe_compile.spec import GateFunction

SUM_BLOCK = 1024
MAX_UNSORTED_SLOTS = 16

# activations and their scales, weights and their scales, result
_GemmTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_ONE_SLOT_A_BLOCK = {"sorted_slots_ptr": None, "block_expert_ptr": None, "block_count_ptr": None}

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def half_launches(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    packed: PackedExperts,
    gate: GateFunction,
    quantized: bool,
    config: Config,
    arch: str,
) -> list[Launch]:
    """Every tensor is contiguous. ``quantized``: activations are rounded to MXFP8 before either projection."""
    assert config.block_m is not None
    num_tokens, top_k = topk_ids.shape
    num_slots = topk_ids.numel()
    hidden_size, intermediate_size = packed.hidden_size, packed.intermediate_size
    rows = packed.gate_up.shape[1]

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden_states.device)

    ids = {
        "ids_ptr": topk_ids,
        "expert_map_ptr": expert_map,
        "NUM_EXPERTS": packed.num_experts,
        "NUM_IDS": packed.num_experts if expert_map is None else expert_map.shape[0],
    }
    # Few slots seldom share an expert. Then each is a block of its own, and nothing is sorted.
    sort = num_slots > MAX_UNSORTED_SLOTS
    overlap = overlaps(arch)
    tail_m = 0 if config.tail is None or config.tail.block_m is None else config.tail.block_m
    tables = empty_tables(topk_ids, packed.num_experts, config.block_m, tail_m)
    x, x_scale = empty(num_tokens, hidden_size, dtype=torch.float16), empty(num_tokens, dtype=torch.float32)
    z, z_scale = empty(num_slots, intermediate_size, dtype=torch.float16), empty(num_slots, dtype=torch.float32)
    gate_up = empty(config.gate_up.split_k, num_slots, rows, dtype=torch.float32)
    # Where they are a large part of all that is moved, as float16: 2e-4 of relative error, a tenth of bfloat16's.
    half_partials = config.block_m >= 64 and out.dtype == hidden_states.dtype == torch.bfloat16 and not quantized
    partials = empty(
        config.down.split_k, num_slots, hidden_size, dtype=torch.float16 if half_partials else torch.float32
    )
    partials_scale = empty(num_slots, -(-hidden_size // 64), dtype=torch.float32) if half_partials else None

    launches = []
    num_sorting, sorting = sort_arguments(tables, topk_ids, expert_map, packed.num_experts)
    if not sort:
        num_sorting = 0
    elif num_slots > MAX_SLOTS_OF_ONE_LAUNCH:
        num_sorting, launches = 0, sort_many_slots(tables, topk_ids, expert_map, packed.num_experts)
    block = triton.next_power_of_2(max(hidden_size, 32))
    launches.append(
        Launch(
            half_kernels.prepare_kernel,
            (num_sorting + num_tokens,),
            {
                "x_ptr": hidden_states,
                "half_ptr": x,
                "scale_ptr": x_scale,
                **sorting,
                "num_sorting": num_sorting,
                "SORT": num_sorting > 0,
                "H": hidden_size,
                "QUANTIZED": quantized,
                "BLOCK": block,
                "OVERLAP": overlap,
            },
            _row_warps(block),
        )
    )

    def gemms(
        projection: str, tensors: _GemmTensors, slots_per_row: int, out_scale: torch.Tensor | None = None
    ) -> list[Launch]:
        common = {
            **ids,
            "out_scale_ptr": out_scale,
            "num_slots": num_slots,
            "HARDWARE": converts_e4m3(arch),
            "OVERLAP": overlap,
        }
        blocks = tables.blocks.arguments()
        if not sort:
            blocks |= {**_ONE_SLOT_A_BLOCK, "num_blocks": num_slots}
        wait = "tables" if sort and projection == "gate_up" else "x"
        tiles: Tiles = getattr(config, projection)
        found = [_gemm({**common, **blocks, "WAIT": wait}, tiles, *tensors, slots_per_row)]
        if config.tail is not None and tables.tails is not None:
            # The kernel before the previous one has ended, and with it whatever the tails read.
            arguments = {**common, **tables.tails.arguments(), "WAIT": "end"}
            found.append(_gemm(arguments, getattr(config.tail, projection), *tensors, slots_per_row))
        return found

    launches += gemms("gate_up", (x, x_scale, packed.gate_up, packed.gate_up_scale, gate_up), top_k)
    block = triton.next_power_of_2(max(intermediate_size, 32))
    launches.append(
        Launch(
            half_kernels.activate_kernel,
            (num_slots,),
            {
                "partials_ptr": gate_up,
                "bias_ptr": packed.gate_up_bias,
                **ids,
                "half_ptr": z,
                "scale_ptr": z_scale,
                "num_slots": num_slots,
                "I": intermediate_size,
                "SPLIT_K": config.gate_up.split_k,
                "BLOCK": block,
                "DTYPE": _TRITON_DTYPES[hidden_states.dtype],
                "QUANTIZED": quantized,
                **gate_constants(gate),
                "OVERLAP": overlap,
            },
            _row_warps(block),
        )
    )
    launches += gemms("down", (z, z_scale, packed.down, packed.down_scale, partials), 1, partials_scale)
    launches.append(
        Launch(
            half_kernels.sum_kernel,
            (num_tokens, -(-hidden_size // SUM_BLOCK)),
            {
                "partials_ptr": partials,
                "partials_scale_ptr": partials_scale,
                "bias_ptr": packed.down_bias,
                **ids,
                "weights_ptr": topk_weights,
                "out_ptr": out,
                "num_slots": num_slots,
                "H": hidden_size,
                "TOP_K": top_k,
                "SPLIT_K": config.down.split_k,
                "BLOCK": SUM_BLOCK,
                "OVERLAP": overlap,
            },
        )
    )
    return [replace(launch, overlap=overlap) if "OVERLAP" in launch.arguments else launch for launch in launches]


def overlaps(arch: str) -> bool:
    """Whether the hardware has programmatic dependent launch: NVIDIA since sm_90."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90


def _gemm(
    arguments: dict[str, Any],
    tiles: Tiles,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    slots_per_row: int,
) -> Launch:
    _, n, k = weight.shape
    return Launch(
        half_gemm.half_gemm_kernel,
        (arguments["num_blocks"] * -(-n // tiles.block_n), tiles.split_k),
        {
            **arguments,
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "w_ptr": weight.view(torch.uint8),
            "w_scale_ptr": weight_scale,
            "out_ptr": out,
            "N": n,
            "K": k,
            "SLOTS_PER_ROW": slots_per_row,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "SPLIT_K": tiles.split_k,
            "WEIGHTS_FIRST": arguments["BLOCK_M"] <= 32,
        },
        tiles.num_warps,
        tiles.num_stages,
    )


def _row_warps(block: int) -> int:
    """Warps for a kernel that holds a row of ``block`` elements: up to 32 elements a thread, 4 to 16 warps."""
    return min(max(block // 1024, 4), 16)
