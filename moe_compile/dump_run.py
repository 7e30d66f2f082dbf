"""Run a dumped graph: rebuild its inputs, run it, compare with the recorded outputs.

A dump holds a copy of this file beside its graphs, as ``run_graph.py``; so it imports torch and safetensors alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-2  # relative L2: the same kernels on another machine, not another computation

# ("name", 16) for a number, ("name", "bfloat16", shape, stride, "cpu") for a tensor.
InputSpec = tuple[Any, ...]


def rebuild_inputs(specs: Sequence[InputSpec], recorded: dict[str, torch.Tensor]) -> list[Any]:
    """The inputs of a graph: recorded values where there are any, else random ones from the input's number as seed.

    Random weights are normal with standard deviation ``shape[-1] ** -0.5``, so that activations keep their size.
    Random integers would be no valid indices, so integers that were not recorded are 0 (uint8, a scale: 120).
    """
    inputs: list[Any] = []
    for number, (name, *rest) in enumerate(specs):
        if len(rest) == 1:
            inputs.append(rest[0])
            continue
        dtype, shape, stride, device = getattr(torch, rest[0]), *rest[1:]
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if name in recorded:
            value.copy_(recorded[name])
        elif dtype.is_floating_point or dtype.is_complex:
            generator = torch.Generator().manual_seed(number)
            scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[-1] else 1.0
            value.copy_(torch.randn(shape, generator=generator) * scale)
        else:
            value.fill_(120 if dtype == torch.uint8 else 0)
        inputs.append(value)
    return inputs


def run(graph: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors that the graph returns, by the name ``output0`` and so on. Random operators draw from seed 0.

    The generators of the process are left as they were: a dump must not change what the model draws next.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
        torch.manual_seed(0)
        result = graph(*inputs)
    flat = result if isinstance(result, tuple | list) else [result]
    return {f"output{i}": value for i, value in enumerate(flat) if isinstance(value, torch.Tensor)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; 0 for two equal tensors, infinity for different shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if torch.equal(actual, expected):
        return 0.0
    if actual.dtype.is_complex:
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    norm = float(expected.double().norm())
    error = float((actual.double() - expected.double()).norm())
    return error / norm if norm else float("inf")


def main(graph: Callable[..., Any], specs: Sequence[InputSpec], inputs: str, outputs: str, file: str) -> None:
    """What ``python aten_before.py`` does. Exit code 1 if an output differs from the recorded one."""
    folder = Path(file).parent
    recorded, expected = (load_file(path) if path.exists() else {} for path in (folder / inputs, folder / outputs))
    tensors = sum(len(spec) > 2 for spec in specs)
    known = sum(spec[0] in recorded for spec in specs)
    others = "" if known == tensors else ", the others random"
    print(f"{tensors} input tensors, {known} of them recorded{others}")
    wrong = 0
    for name, value in run(graph, rebuild_inputs(specs, recorded)).items():
        line = f"{name}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if not value.is_meta and value.numel() and not value.dtype.is_complex:
            line += f" norm {float(value.detach().double().norm()):.6g}"
        if name in expected:
            error = relative_error(value, expected[name])
            wrong += not error <= TOLERANCE
            line += f", relative error to the recorded output {error:.1e}"
        print(line)
    if not expected:
        print("no outputs were recorded: the inputs are too large, or the graph did not run while it was dumped")
    sys.exit(1 if wrong else 0)
