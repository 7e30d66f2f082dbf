"""``explain``: compile once without caches, run once, and say what happened to every expert block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_compile import hf, layer_names, packed_weights, report
from moe_compile.backend import compile_graph
from moe_compile.errors import MoeCompileError
from moe_compile.graph_breaks import break_places, broken_at
from moe_compile.hf_accelerate import plain_forward
from moe_compile.options import CompileOptions
from moe_compile.report import CompileReport, counted
from moe_compile.torch_internals import (
    CompileTimeError,
    as_not_compiled,
    break_frames,
    break_messages,
    frame_id,
    graph_breaks,
    isolated_compile,
    without_caches,
)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> CompileReport:
    """What ``torch.compile(model, backend="moe_rocm")`` does to ``model(*args, **kwargs)``, block by block.

    The model is compiled from scratch and called once under ``torch.no_grad()``. Options come from the environment
    (``MOE_COMPILE_MOE_BACKEND`` and so on).

    Args:
        model: a module or function; of a compiled one the original is taken.

    Raises:
        OptionError, BackendRefused, RewriteRefused (each a ValueError): as compiling it would.
    """
    return explain_with(CompileOptions.parse(), model, args, kwargs)


def explain_with(
    options: CompileOptions, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CompileReport:
    """:func:`explain` with explicit options."""
    return compile_and_run(options, model, args, kwargs)[0]


def compile_and_run(
    options: CompileOptions, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CompileReport, Any]:
    """The report of :func:`explain`, and what the model returned."""
    original = getattr(model, "_orig_mod", model)
    found: list[CompileReport] = []
    frames: set[object] = set()
    owner = layer_names.owners(original)
    graphs: list[tuple[CompileReport, object, str | None, dict[frozenset[tuple[str, bool]], None]]] = []

    # A new function each time: Dynamo never takes code that it compiled for another backend.
    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            compiled, one = compile_graph(gm, example_inputs, options)
        except MoeCompileError as error:
            raise CompileTimeError.wrap(error) from None
        frame = frame_id()
        found.append(replace(one, recompiles=int(frame in frames)))
        frames.add(frame)
        used: dict[frozenset[tuple[str, bool]], None] = {}
        graphs.append((one, frame, broken_at(break_frames(gm)), used))

        def run(*args: Any) -> Any:
            used[layer_names.used_modules(args, owner)] = None
            return compiled(*args)

        return run

    before, packed = graph_breaks(), packed_weights.statistics().nbytes
    start = time.perf_counter()
    with plain_forward(original), as_not_compiled(original), without_caches(), torch.no_grad(), break_messages() as log:
        result = isolated_compile(original, backend)(*args, **kwargs)
    places = break_places(log, original)
    blocks = [
        layer_names.GraphBlocks(tuple(layer_names.named(layer, run) for layer in one.layers), frame, place)
        for one, frame, place, used in graphs
        for run in used or [frozenset()]
    ]
    merged = replace(
        report.merge(found),
        layers=layer_names.joined(blocks),
        packed_bytes=max(0, packed_weights.statistics().nbytes - packed),
        total_seconds=time.perf_counter() - start,
    )
    breaks = {reason: n - before.get(reason, 0) for reason, n in graph_breaks().items() if n > before.get(reason, 0)}
    for note in _notes(original, breaks, places, merged):
        merged = report.with_note(merged, note)
    return merged, result


def _notes(model: object, breaks: Mapping[str, int], places: Sequence[str], merged: CompileReport) -> list[str]:
    notes = []
    if breaks:
        reasons = "; ".join(breaks) + "".join(f"\n    at {place}" for place in places)
        notes.append(
            f"{counted(sum(breaks.values()), 'graph break')} left {counted(merged.graphs, 'graph')} of the model: "
            f"{reasons}\n    A block is only found where one graph holds all of it; "
            'TORCH_LOGS="graph_breaks" shows the tracebacks'
        )
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation == "eager":
        notes.append(
            "the model uses experts_implementation='eager', whose data-dependent loop Dynamo cannot capture; "
            "load it with experts_implementation='grouped_mm' or call model.set_experts_implementation('grouped_mm'), "
            "or use moe_compile.accelerate(model)"
        )
    ignored = hf.ignored_name(model)
    if ignored is not None:
        notes.append(ignored)
    return notes


def refresh(model: torch.nn.Module) -> int:
    """Pack again, in place, the expert weights of ``model`` that have been packed; returns how many packs were rebuilt.

    Only for changes that PyTorch does not count: edits through ``.data``, and changes made before replaying a CUDA
    graph that was captured by hand. ``load_state_dict``, optimizers and in-place operators need no call.

    Raises:
        PackedWeightsError: only some of the tensors of one pack belong to ``model``.
    """
    return packed_weights.refresh([*model.parameters(), *model.buffers()])
