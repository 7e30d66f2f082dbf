"""The files of one graph: written while it compiles, completed when it has run once."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from safetensors.torch import save_file
from torch.fx import Graph, GraphModule

from moe_compile import dump_bytecode, dump_run
from moe_compile.dump_blocks import DumpedBlock, FoundBlock, rewritten_blocks
from moe_compile.dump_code import GraphFile, graph_file
from moe_compile.passes.find_experts import MoEMatch
from moe_compile.passes.near_misses import NearMiss
from moe_compile.quiet import one_line
from moe_compile.report import CompileReport, LayerReport
from moe_compile.torch_internals import real_tensors, trace_artifact

logger = logging.getLogger("moe_compile.dump")

# A tensor above this is not recorded but made again from a seed; of all together no more than the second.
TENSOR_LIMIT, TOTAL_LIMIT = 4 << 20, 256 << 20
# Inputs above this are not made twice in memory just to record what a graph gives for them.
RUN_LIMIT = 2 << 30
REGISTER_OPERATORS = "import moe_compile.block_errors, moe_compile.kernels.ops  # they register operators"


class GraphDump:
    """One ``graphN`` folder. ``before`` and ``after`` make it an observer of the pass."""

    def __init__(self, folder: Path, number: int, changed: Callable[[], None]) -> None:
        self.folder = folder
        self.number = number
        self.report: CompileReport | None = None
        self.blocks: list[DumpedBlock] = []
        self.problems: list[str] = []
        self._changed = changed
        self._graphs = 0  # that the pass has seen
        self._compiled = 0
        self._last: str | None = None
        self._before: tuple[GraphModule, tuple[FoundBlock, ...]] | None = None
        self._to_run: dict[str, list[tuple[str, GraphModule, GraphFile]]] = {}
        self._code: CodeType | None = None
        shutil.copyfile(dump_run.__file__, folder / "run_graph.py")

    def captured(self, gm: GraphModule) -> None:
        """Dynamo's graph, before anything has happened to it."""
        self._write_graph("dynamo", _copy(gm, gm.graph), "Dynamo's graph", "dynamo")
        dump_bytecode.when_frame_is_done(self._frame_done)

    def before(self, graph: Graph, found: Sequence[MoEMatch | NearMiss]) -> None:
        """The ATen graph as the pass gets it, and what was found in it."""
        # Inductor runs the pass on the subgraphs of a graph first and on the graph itself last.
        self._last = f"aten{self._graphs or ''}"
        self._graphs += 1
        module = _copy(graph.owning_module, graph)
        self._before = module, tuple(_found(one) for one in found)
        self._write_graph(f"{self._last}_before", module, "the ATen graph before the pass", self._last)

    def after(self, graph: Graph, report: CompileReport) -> None:
        """The ATen graph as Inductor gets it."""
        assert self._before is not None
        assert self._last is not None
        module, found = self._before
        rewritten = _copy(graph.owning_module, graph)
        title = "the ATen graph after the pass"
        self._write_graph(f"{self._last}_after", rewritten, title, self._last, REGISTER_OPERATORS)
        outcomes = report.layers[len(report.layers) - len(found) :]
        for block in rewritten_blocks(module.graph, rewritten.graph, found, [_outcome(one) for one in outcomes]):
            (self.folder / f"block{len(self.blocks)}.diff").write_text(block.diff)
            self.blocks.append(block)
        self._before = None

    def compiled(self, inductor_code: str | None) -> Callable[[Sequence[Any]], None]:
        """An ATen graph is compiled; returns what records the inputs of its first run."""
        which, self._last = self._last, None  # None for a backward graph, which the pass passes by
        if inductor_code:
            name = f"inductor{self._compiled or ''}"
            self._compiled += 1
            (self.folder / f"{name}.py").write_text(inductor_code)
            trace_artifact(f"moe_compile_graph{self.number}_{name}", inductor_code)
        return lambda inputs: None if which is None else self.record_inputs(which, inputs)

    def finished(self, report: CompileReport) -> None:
        """The graph is compiled."""
        self.report = report
        self._changed()

    def record_inputs(self, which: str, inputs: Sequence[Any]) -> None:
        """Keep the small inputs of a run, before it can change them, with what the graphs give for them."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        waiting = self._to_run.pop(which, [])
        if not waiting:
            return
        specs = waiting[0][2].specs
        recorded = {name: value for _, _, file in waiting for name, value in _constants(file.constants).items()}
        total = 0
        for spec, value in zip(specs, inputs, strict=False):
            if isinstance(value, torch.Tensor) and not value.dtype.is_complex:
                size = value.numel() * value.element_size()
                if size <= TENSOR_LIMIT and total + size <= TOTAL_LIMIT:
                    recorded[spec[0]] = value.detach().cpu().contiguous().clone()
                    total += size
        save_file(recorded, self.folder / f"{which}.inputs.safetensors")
        if sum(_bytes(spec) for spec in specs) > RUN_LIMIT:
            self.problems.append(f"{which}: no outputs recorded, the inputs are larger than {RUN_LIMIT >> 30} GiB")
            return
        for name, module, file in waiting:
            try:
                outputs = dump_run.run(module, dump_run.rebuild_inputs(file.specs, recorded))
            except Exception as error:  # a captured graph may need state that only its model has
                self.problems.append(f"{name}.py does not run by itself: {one_line(error)}")
                continue
            kept = {key: value.detach().cpu().contiguous().clone() for key, value in outputs.items()}
            kept = {
                key: value for key, value in kept.items() if value.nbytes <= TENSOR_LIMIT and not value.is_complex()
            }
            save_file(kept, self.folder / f"{name}.outputs.safetensors")

    def first_run_done(self) -> None:
        """The graph has run: its guards exist now."""
        self._to_run.clear()
        if self._code is not None:
            (self.folder / "guards.txt").write_text(dump_bytecode.guards(self._code) + "\n")
            self._code = None
        self._changed()

    def _frame_done(self, code: CodeType, new_code: CodeType) -> None:
        self._code = code
        text, problem = dump_bytecode.decompiled(code, new_code)
        if problem:
            self.problems.append(problem)
        (self.folder / "bytecode.py").write_text(text)

    def _write_graph(self, name: str, module: GraphModule, what: str, inputs: str, imports: str = "") -> None:
        title = f"graph{self.number}: {what}."
        names = f"{name}.py", f"{inputs}.inputs.safetensors", f"{name}.outputs.safetensors"
        file = graph_file(module, title, *names, imports)
        (self.folder / names[0]).write_text(file.text)
        if file.constants:
            with real_tensors():
                save_file(_constants(file.constants), self.folder / names[1])
        self._to_run.setdefault(inputs, []).append((name, module, file))
        trace_artifact(f"moe_compile_graph{self.number}_{name}", file.text)


def _copy(owner: GraphModule | None, graph: Graph) -> GraphModule:
    return GraphModule(owner if owner is not None else {}, copy.deepcopy(graph))


def _found(one: MoEMatch | NearMiss) -> FoundBlock:
    if isinstance(one, NearMiss):
        return FoundBlock(one.name, one.form, one.location, one.node.name, None)
    return FoundBlock(one.name, one.form, one.location, one.root.name, one.root.name)


def _outcome(layer: LayerReport) -> str:
    return layer.moe_backend or ""


def _constants(constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"constant:{name}": value.detach().cpu().contiguous().clone() for name, value in constants.items()}


def _bytes(spec: dump_run.InputSpec) -> int:
    if len(spec) == 2:
        return 0
    size = torch.empty((), dtype=getattr(torch, spec[1])).element_size()
    for length in spec[2]:
        size *= length
    return size
