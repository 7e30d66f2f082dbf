"""One launch: which launcher, on which tensors; compiled once for each set of constants and pointer types."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_compile.errors import GraphCaptureError

_lock = threading.Lock()
_loaded: set[Any] = set()


@dataclass(frozen=True)
class Launch:
    """A launcher of `launchers` by name. Pointers first, then run-time integers, then the grid, then constants."""

    name: str
    grid: tuple[int, int]
    tensors: tuple[tuple[str, Tensor], ...]  # (element type of FlyDSL that the kernel sees, tensor)
    integers: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is compiled for."""
        return (self.name, tuple(element for element, _ in self.tensors), len(self.integers), self.constants)


@functools.cache
def compiled(key: tuple[Any, ...]) -> Any:
    """The callable of ``flyc.compile``: null pointers stand in for tensors, so nothing is launched."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from moe_compile.kernels.flydsl import launchers

    name, elements, integers, constants = key
    pointers = [flyc.from_c_void_p(getattr(fx, element), None) for element in elements]
    return flyc.compile(getattr(launchers, name), *pointers, *([1] * (integers + 2)), *constants, fx.Stream(None))


def execute(launches: list[Launch], device: torch.device) -> None:
    """Launch on the current stream of ``device``. Waits for nothing.

    Raises:
        GraphCaptureError: a graph is being captured and a kernel has not been loaded on this device yet.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        for launch in launches:
            key = (device, launch.key)
            if key not in _loaded and torch.cuda.is_current_stream_capturing():
                raise GraphCaptureError(
                    "the FlyDSL kernels of this expert block are compiled and loaded on their first call, which cannot "
                    "happen while a CUDA graph is being captured. Call the model once with as many tokens before."
                )
            with _lock:
                function = compiled(launch.key)
            pointers = [tensor.data_ptr() for _, tensor in launch.tensors]
            function(*pointers, *launch.integers, *launch.grid, *launch.constants, stream.cuda_stream)
            _loaded.add(key)
