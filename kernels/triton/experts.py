"""One expert block on the GPU: which kernels run, on which tensors.

bfloat16 and float16 hidden states: see half. float32 hidden states, of which no model is made, keep float32 products.
Up to `config.MAX_UNSORTED_SLOTS` slots nothing is sorted::

    hidden (T, H) -> gate_up_slot_kernel -> intermediate (S, I) -> down_slot_kernel -> out (T, H)

Otherwise each weight tile serves a block of slots of one expert::

    topk_ids -> sort_kernel (count, scan and place from 4096 slots on) -> sorted slots
    hidden (T, H) -> gate_up_kernel -> intermediate (S, I) -> down_kernel -> partials (S, H) float32 -> reduce_kernel

With ``activations="mxfp8"`` a quantize_kernel goes before either projection. Every grid and every size is a function of
shapes alone: nothing waits for the device, so a call can be captured in a CUDA graph and replayed with other routing.
No kernel adds floating-point numbers in an order that may change: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.kernels.packed import PackedExperts
from moe_compile.kernels.triton import gemm_kernels, quantize_kernels, reduce_kernels, slot_kernels
from moe_compile.kernels.triton.checks import check_inputs
from moe_compile.kernels.triton.config import Config, choose_config
from moe_compile.kernels.triton.gate import gate_constants
from moe_compile.kernels.triton.half import half_launches
from moe_compile.kernels.triton.launch import Launch, execute
from moe_compile.kernels.triton.routing import sort_slots
from moe_compile.spec import GateFunction
from moe_compile.target import Target

REDUCE_BLOCK = 1024
QUANTIZE_BLOCKS = 32


def experts(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    *,
    expert_map: torch.Tensor | None = None,
    activations: str = "bf16",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``out[t] = sum_k topk_weights[t, k] * down[e] @ act(gate[e] @ x[t], up[e] @ x[t])``, as `reference.experts`.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32.
        topk_ids: (T, K) int32 or int64. Ids below 0 or from E on (or mapped to -1) contribute exactly zero.
        topk_weights: (T, K), a float dtype.
        packed: canonical MXFP8 weights, on the same device.
        gate: the function between the two projections.
        expert_map: (global experts,) int32 or int64, global id -> index into ``packed``, -1 for "not here".
        activations: ``bf16`` uses activations in the dtype of the hidden states, ``mxfp8`` quantises them before either
            projection; ``auto`` is ``bf16`` here.
        out_dtype: of the result; the dtype of ``hidden_states`` if None.

    Returns:
        (T, H), contiguous, aliasing no input.

    Raises:
        ExpertInputError: shapes, dtypes or devices that do not fit together, or an unknown choice.
    """
    check_inputs(hidden_states, topk_ids, topk_weights, packed, gate, expert_map, activations, out_dtype)
    device = hidden_states.device
    arch = Target.of(device).arch
    out, launches = plan(
        hidden_states, topk_ids, topk_weights, packed, gate, arch, expert_map, activations == "mxfp8", out_dtype
    )
    execute(launches, device)
    return out


def plan(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    packed: PackedExperts,
    gate: GateFunction,
    arch: str,
    expert_map: torch.Tensor | None = None,
    quantized: bool = False,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """The result, still to be computed, and the launches that compute it. Tensors may be on the meta device."""
    num_tokens, top_k = topk_ids.shape
    sizes = packed.num_experts, packed.hidden_size, packed.intermediate_size
    out_dtype = hidden_states.dtype if out_dtype is None else out_dtype
    if num_tokens == 0 or top_k == 0 or 0 in sizes:
        return torch.zeros(hidden_states.shape, dtype=out_dtype, device=hidden_states.device), []
    out = torch.empty(hidden_states.shape, dtype=out_dtype, device=hidden_states.device)
    dot = "fp32" if hidden_states.dtype == torch.float32 else "half"
    config = config or choose_config(num_tokens, top_k, *sizes, dot, arch)
    routing = (
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        None if expert_map is None else expert_map.contiguous(),
    )
    arguments = (out, hidden_states.contiguous(), *routing, packed, gate, quantized, config)
    if dot == "half":
        return out, half_launches(*arguments, arch)
    return out, (_by_slot if config.block_m is None else _by_expert)(*arguments)


def _by_slot(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    packed: PackedExperts,
    gate: GateFunction,
    quantized: bool,
    config: Config,
) -> list[Launch]:
    num_tokens, top_k = topk_ids.shape
    hidden_size, intermediate_size = packed.hidden_size, packed.intermediate_size
    intermediate = hidden_states.new_empty((topk_ids.numel(), intermediate_size))
    ids = _ids(topk_ids, expert_map, packed)
    sizes = {"H": hidden_size, "I": intermediate_size, "TOP_K": top_k}
    x, quantize_x = _operand(hidden_states, quantized)
    z, quantize_z = _operand(intermediate, quantized)
    first, second = config.gate_up, config.down
    return [
        *quantize_x,
        Launch(
            slot_kernels.gate_up_slot_kernel,
            (topk_ids.numel(), -(-intermediate_size // first.block_n)),
            {
                **x,
                **_weights(packed.gate_up, packed.gate_up_scale, packed.gate_up_bias),
                **ids,
                "out_ptr": intermediate,
                **sizes,
                "BLOCK_N": first.block_n,
                "BLOCK_K": first.block_k,
                **gate_constants(gate),
            },
            first.num_warps,
            first.num_stages,
        ),
        *quantize_z,
        Launch(
            slot_kernels.down_slot_kernel,
            (num_tokens, -(-hidden_size // second.block_n)),
            {
                **z,
                **_weights(packed.down, packed.down_scale, packed.down_bias),
                **ids,
                "weights_ptr": topk_weights,
                "out_ptr": out,
                **sizes,
                "BLOCK_N": second.block_n,
                "BLOCK_K": second.block_k,
            },
            second.num_warps,
            second.num_stages,
        ),
    ]


def _by_expert(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    packed: PackedExperts,
    gate: GateFunction,
    quantized: bool,
    config: Config,
) -> list[Launch]:
    assert config.block_m is not None
    num_tokens, top_k = topk_ids.shape
    hidden_size, intermediate_size = packed.hidden_size, packed.intermediate_size
    order, sort = sort_slots(topk_ids, expert_map, packed.num_experts, config.block_m)
    intermediate = hidden_states.new_empty((topk_ids.numel(), intermediate_size))
    # float32: rounding the partials to bfloat16 would cost as much accuracy again as rounding the result.
    partials = hidden_states.new_empty((topk_ids.numel(), hidden_size), dtype=torch.float32)
    sizes = {"H": hidden_size, "I": intermediate_size, "DOT": "bf16" if quantized else "fp32"}
    x, quantize_x = _operand(hidden_states, quantized)
    z, quantize_z = _operand(intermediate, quantized)
    first, second = config.gate_up, config.down
    return [
        *sort,
        *quantize_x,
        Launch(
            gemm_kernels.gate_up_kernel,
            (order.blocks.number * -(-intermediate_size // first.block_n),),
            {
                **x,
                **_weights(packed.gate_up, packed.gate_up_scale, packed.gate_up_bias),
                "out_ptr": intermediate,
                **order.blocks.arguments(),
                **sizes,
                "TOP_K": top_k,
                "BLOCK_N": first.block_n,
                "BLOCK_K": first.block_k,
                **gate_constants(gate),
            },
            first.num_warps,
            first.num_stages,
        ),
        *quantize_z,
        Launch(
            gemm_kernels.down_kernel,
            (order.blocks.number * -(-hidden_size // second.block_n),),
            {
                **z,
                **_weights(packed.down, packed.down_scale, packed.down_bias),
                "out_ptr": partials,
                **order.blocks.arguments(),
                **sizes,
                "BLOCK_N": second.block_n,
                "BLOCK_K": second.block_k,
            },
            second.num_warps,
            second.num_stages,
        ),
        Launch(
            reduce_kernels.reduce_kernel,
            (num_tokens, -(-hidden_size // REDUCE_BLOCK)),
            {
                "partials_ptr": partials,
                **_ids(topk_ids, expert_map, packed),
                "weights_ptr": topk_weights,
                "out_ptr": out,
                "H": hidden_size,
                "TOP_K": top_k,
                "BLOCK": REDUCE_BLOCK,
            },
        ),
    ]


def _operand(x: torch.Tensor, quantized: bool) -> tuple[dict[str, Any], list[Launch]]:
    """``x_ptr`` and ``x_scale_ptr`` of a projection of ``x`` (rows, K), and the launch that quantises, if any."""
    if not quantized:
        return {"x_ptr": x, "x_scale_ptr": None}, []
    rows, k = x.shape
    scales_per_row = -(-k // 32)
    values = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, scales_per_row), dtype=torch.uint8, device=x.device)
    arguments = {"x_ptr": x, "values_ptr": values, "scales_ptr": scales, "K": k, "BLOCKS": QUANTIZE_BLOCKS}
    grid = (rows, -(-scales_per_row // QUANTIZE_BLOCKS))
    return {"x_ptr": values, "x_scale_ptr": scales}, [Launch(quantize_kernels.quantize_kernel, grid, arguments)]


def _weights(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    return {"w_ptr": values.view(torch.uint8), "w_scale_ptr": scales, "bias_ptr": bias}


def _ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, packed: PackedExperts) -> dict[str, Any]:
    num_ids = packed.num_experts if expert_map is None else expert_map.shape[0]
    return {"ids_ptr": topk_ids, "expert_map_ptr": expert_map, "NUM_EXPERTS": packed.num_experts, "NUM_IDS": num_ids}
