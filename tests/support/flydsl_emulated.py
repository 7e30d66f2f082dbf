"""The launches of the FlyDSL backend on CPU tensors: each compiled for gfx950 and executed by the emulator."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from flydsl_gfx950 import code_object
from gfx950 import CodeObject, run_kernel

from moe_compile.kernels.flydsl.launch import Launch, compiled


@dataclass
class Emulator:
    """Stands in for `launch.execute`. Strict; every breach of memory or a race fails at once."""

    images: dict[Any, bytes] = field(default_factory=dict)
    per_op: Counter[str] = field(default_factory=Counter)
    launched: list[str] = field(default_factory=list)

    def execute(self, launches: list[Launch], device: torch.device) -> None:
        for launch in launches:
            image = self.images.get(launch.key)
            if image is None:
                image = self.images[launch.key] = code_object(compiled.__wrapped__(launch.key))
            arrays = [_bytes(tensor) for _, tensor in launch.tensors]
            stats = run_kernel(image, {}, launch.grid, [*arrays, *launch.integers], strict=True)
            assert stats["slack_ok"]
            assert not stats["races"]
            self.per_op += stats["per_op"]
            self.launched.append(launch.name)

    @property
    def scaled_mfma(self) -> int:
        return sum(count for name, count in self.per_op.items() if re.search("mfma_scale", name, re.IGNORECASE))


def _bytes(tensor: torch.Tensor) -> Any:
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy()


def resources(image: bytes) -> dict[str, int]:
    """What the metadata of the only kernel says of registers, LDS and scratch."""
    (info,) = CodeObject(image).kernels.values()
    return {name: value for name, value in info.items() if isinstance(value, int)}
