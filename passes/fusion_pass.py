"""``MoEFusionPass``: the pass that Inductor runs on each post-grad graph, and that ``inductor=False`` runs itself."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

import moe_compile.kernels
import moe_compile.passes
from moe_compile._version import __version__
from moe_compile.errors import MoeCompileError, RewriteRefused
from moe_compile.kernels.registry import BACKENDS, missing_package, refuse_hopeless_choice
from moe_compile.options import CompileOptions
from moe_compile.passes.find_experts import MoEMatch, find_experts
from moe_compile.passes.fx_utils import tensor
from moe_compile.passes.match_experts_op import FORM, ExpertOperator, find_operators
from moe_compile.passes.near_misses import NearMiss
from moe_compile.passes.rewrite import check_output, compare_with_original, rewrite
from moe_compile.report import CompileReport, LayerReport
from moe_compile.selection import Selection, select_backend
from moe_compile.sharding import ShardedInput, gate_up_problem
from moe_compile.target import Capabilities, Target
from moe_compile.torch_internals import (
    CustomGraphPass,
    GraphPassBase,
    is_backward_graph,
    is_inference_graph,
    run_user_pass,
    static_placeholders,
)

logger = logging.getLogger("moe_compile.passes")

GRADIENTS = (
    "gradients are enabled, and the MXFP8 experts have none; compile and call the model under torch.no_grad() or "
    "torch.inference_mode()"
)


class PassObserver(Protocol):
    """Told about each graph, when its blocks are found and when they are rewritten. Must not change the graph."""

    def before(self, graph: Graph, found: Sequence[MoEMatch | NearMiss]) -> None: ...

    def after(self, graph: Graph, report: CompileReport) -> None: ...


class MoEFusionPass(GraphPassBase):
    """Find expert blocks, choose a backend for each, rewrite, report.

    ``uuid`` covers this package's sources and version, the options, the machine and the kernel packages, and the user's
    own passes: an artifact in Inductor's or AOTAutograd's cache is only reused where this pass would do the same again.

    Args:
        options: checked options.
        user_passes: the ``post_grad_custom_pre_pass`` that was configured before; they run first.
        observer: told about each graph, for a dump.
        sharded: the graph's inputs that are DTensors, which AOTAutograd turns into plain tensors.
    """

    def __init__(
        self,
        options: CompileOptions,
        user_passes: Sequence[Any] = (),
        observer: PassObserver | None = None,
        sharded: Sequence[ShardedInput] = (),
    ) -> None:
        self.sharded = tuple(sharded)
        self.options = options
        self.observer = observer
        self.user_passes = tuple(user_passes)
        self.capabilities = Capabilities.detect()
        self.reports: list[CompileReport] = []
        self.error: MoeCompileError | None = None  # Inductor wraps what a pass raises; the backend raises this one

    def uuid(self) -> Any:
        """A digest, or None (do not cache) if a pass of the user has no uuid of its own."""
        # Inductor's key holds its config patches; a repr of them here could hold an address and never match again.
        options = replace(self.options, inductor=self.options.inductor is not False)
        parts = [package_digest(), options.cache_key(), repr(self.capabilities), repr(_machine())]
        parts += [f"{one.shape} {one.dtype} {one.placements}" for one in self.sharded]
        for one in self.user_passes:
            theirs = one.uuid() if isinstance(one, CustomGraphPass) else None
            if not theirs:
                return None
            parts.append(repr(theirs))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        if is_inference is None:  # torch 2.11 does not say
            is_inference = is_inference_graph()
        for one in self.user_passes:
            run_user_pass(one, graph, is_inference)
        if not is_inference and is_backward_graph(graph):
            return  # no forward computation, so nothing to find or to report
        try:
            self.reports.append(self.apply(graph, is_inference, static_placeholders(graph)))
        except MoeCompileError as error:
            self.error = error
            raise

    def apply(self, graph: Graph, is_inference: bool, static_inputs: set[Node] | None = None) -> CompileReport:
        """Rewrite ``graph`` in place and say what was done.

        Raises:
            BackendRefused: an explicit ``moe_backend`` cannot run a block, or nothing on this machine.
            RewriteRefused: ``strict`` and something that looks like a block was left alone.
        """
        start = time.perf_counter()
        operators = find_operators(graph)
        found = find_experts(graph, static_inputs)
        if self.observer is not None:
            self.observer.before(graph, found)
        layers = [_called(one) for one in operators]
        rewritten = 0
        cautions: dict[str, None] = {}
        arch = Target.of(operators[0].device).arch if operators else ""
        for block in found:
            if isinstance(block, NearMiss):
                # In a training graph nothing can be proven: intermediate values are outputs, saved for the backward.
                layers.append(_left_alone(block, block.reason if is_inference else GRADIENTS))
                continue
            target = Target.of(tensor(block.hidden_states).device)
            arch = target.arch
            if not is_inference:
                layers.append(_not_rewritten(block, GRADIENTS))
            elif (split := self._split_problem(block)) is not None:
                layers.append(_not_rewritten(block, split))
            elif self.options.max_rewrites is not None and rewritten >= self.options.max_rewrites:
                layers.append(_not_rewritten(block, f"max_rewrites={self.options.max_rewrites}"))
            else:
                selection = select_backend(self.options, block.spec, target, self.capabilities, BACKENDS)
                replacement = rewrite(graph, block, selection.backend, self.options.activations)
                check_output(replacement, block.root)
                if self.options.verify:
                    compare_with_original(graph, block, replacement)
                layers.append(_rewritten(block, selection))
                rewritten += 1
                cautions |= dict.fromkeys(map(str, selection.cautions))
                missing = missing_package(selection, self.capabilities)
                if missing is not None:
                    _warn_once(
                        f"moe_rocm: {selection.backend} runs the experts; a faster backend is missing: {missing}"
                    )
        if rewritten:
            graph.eliminate_dead_code()
            graph.lint()
        else:
            # A model may be split into graphs: refuse before the first runs, not at the first that has a block.
            refuse_hopeless_choice(self.options, _machine(), self.capabilities)
        seconds = time.perf_counter() - start
        for caution in cautions:
            _warn_once(f"moe_rocm: caution: {caution}")
        report = CompileReport(
            layers=tuple(layers), target=arch, seconds=seconds, notes=tuple(f"caution: {one}" for one in cautions)
        )
        if self.observer is not None:
            self.observer.after(graph, report)
        logger.debug("%d blocks and near misses, %d rewritten, in %.1f ms", len(found), rewritten, seconds * 1e3)
        if self.options.strict and report.skipped:
            reasons = "".join(f"\n  - {layer.name}: {layer.reason}" for layer in layers if layer.reason)
            raise RewriteRefused(
                f"moe_rocm: strict=True, and {report.skipped} expert blocks were not rewritten:{reasons}"
            )
        return report

    def _split_problem(self, match: MoEMatch) -> str | None:
        """Why the block's gate/up weight may not be cut as it is. Sharded inputs are told apart by their local parts'
        shape and dtype: one that is cut wrong keeps all blocks with such a weight from being rewritten."""
        weight, spec = tensor(match.gate_up_proj), match.spec
        for one in self.sharded:
            if (one.shape, one.dtype) == (tuple(weight.shape), weight.dtype):
                rows = 2 if spec.transposed else 1
                problem = gate_up_problem(one.placements, rows, spec.gate.gated, spec.gate_up_layout)
                if problem is not None:
                    return problem
        return None


def _left_alone(miss: NearMiss, reason: str) -> LayerReport:
    return LayerReport(name=miss.name, form=miss.form, reason=reason, node=miss.node.name, location=miss.location)


def _not_rewritten(match: MoEMatch, reason: str) -> LayerReport:
    return LayerReport(
        name=match.name, form=match.form, spec=match.spec, reason=reason, node=match.root.name, location=match.location
    )


def _rewritten(match: MoEMatch, selection: Selection) -> LayerReport:
    return LayerReport(
        name=match.name,
        form=match.form,
        spec=match.spec,
        moe_backend=selection.backend,
        rejected=selection.rejected,
        location=match.location,
    )


def _called(one: ExpertOperator) -> LayerReport:
    return LayerReport(name=one.name, form=FORM, spec=one.spec, moe_backend=one.backend, location=one.location)


@functools.cache
def package_digest() -> str:
    """A digest of every source file of this package, with its version and torch's."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for package in (moe_compile, moe_compile.passes, moe_compile.kernels):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _machine() -> tuple[Target, ...]:
    """What a block can run on here: the GPUs first, then the CPU."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return tuple(dict.fromkeys(map(Target.of, [*gpus, torch.device("cpu")])))
