"""Expert weights as AITER reads them: packed once, and packed again into the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_compile.errors import ExpertInputError
from moe_compile.kernels import layouts
from moe_compile.kernels.aiter_flydsl import limits, shuffle
from moe_compile.kernels.expert_parallel import ExpertMap, ExpertMask, mask_of
from moe_compile.kernels.mxfp8 import scale_count
from moe_compile.spec import ExpertSpec

LAYOUT = "aiter: gate and up in groups of 16 rows, tiles of 16 by 32, scale tiles of 32 by 8"


@dataclass(frozen=True)
class AiterExperts:
    """MXFP8 weights in AITER's order, with the attribute ``is_shuffled`` without which it takes other kernels.

    Weights are float8_e4m3fn (E, 2I, H) and (E, H, I), scales float8_e8m0fnu `shuffle.scale_shape` (E * rows, K/32).
    ``mask`` has every expert of these weights and the fake one.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    mask: ExpertMask

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.down.shape[2]

    @property
    def nbytes(self) -> int:
        tensors = (self.gate_up, self.gate_up_scale, self.down, self.down_scale, self.mask.tensor)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pack(spec: ExpertSpec, weights: Mapping[str, Tensor | None]) -> AiterExperts:
    """Pack one block's weights; ``weights`` are the arguments of `layouts.pack_experts`.

    One expert at a time, so that nothing but the result is as large as the weights.

    Raises:
        ExpertInputError: the weights do not fit the spec, or AITER's kernels cannot run such a block.
    """
    reasons = list(limits.block_reasons(spec, runtime_limit=True))
    if weights["gate_up_bias"] is not None or weights["down_bias"] is not None:
        reasons.append(("AITER's tuned MXFP8 kernels drop biases silently", None))
    if reasons:
        raise ExpertInputError("the aiter backend cannot run this: " + "; ".join(reason for reason, _ in reasons))
    experts, hidden, intermediate = spec.num_experts, spec.hidden_size, spec.intermediate_size
    device = _tensor(weights, "down_proj").device

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        values = torch.empty((experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(shuffle.scale_shape(experts * rows, scale_count(columns)), dtype=torch.uint8, device=device)
        return values, scale.view(torch.float8_e8m0fnu)

    # Tensors made in inference mode could not be repacked in place outside it.
    with torch.inference_mode(False), torch.no_grad():
        packed = AiterExperts(
            *weight(2 * intermediate, hidden),
            *weight(hidden, intermediate),
            mask_of(ExpertMap.identity(experts, device)),
        )
        for tensor in (packed.gate_up, packed.down):
            tensor.is_shuffled = True  # type: ignore[attr-defined]
        repack_into(packed, spec, weights)
    return packed


def repack_into(packed: AiterExperts, spec: ExpertSpec, weights: Mapping[str, Tensor | None]) -> None:
    """`pack` into existing memory, which captured graphs read.

    Raises:
        ExpertInputError: as `pack`, or ``packed`` is of other sizes.
    """
    sizes = (packed.num_experts, packed.hidden_size, packed.intermediate_size)
    if sizes != (spec.num_experts, spec.hidden_size, spec.intermediate_size):
        raise ExpertInputError(f"packed experts of E, H, I = {sizes} cannot take weights of {spec.sizes}")
    one = replace(spec, num_experts=1)
    with torch.inference_mode(False), torch.no_grad():
        for index in range(spec.num_experts):
            chosen = {name: None if t is None else t[index : index + 1] for name, t in weights.items()}
            canonical = layouts.pack_experts(one, **chosen)  # type: ignore[arg-type]
            expert = slice(index, index + 1)
            shuffle.shuffle_weight_into(packed.gate_up[expert], canonical.gate_up, gate_and_up=True)
            shuffle.shuffle_weight_into(packed.down[expert], canonical.down, gate_and_up=False)
            # The rows of one expert are whole tiles, as both 2I and H are multiples of 256.
            for target, scale, gate_and_up in (
                (packed.gate_up_scale, canonical.gate_up_scale, True),
                (packed.down_scale, canonical.down_scale, False),
            ):
                rows = scale.shape[1]
                shuffle.shuffle_scale_into(target[index * rows : (index + 1) * rows], scale, gate_and_up)


def _tensor(weights: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = weights[name]
    if tensor is None:
        raise ExpertInputError(f"{name} is missing")
    return tensor
