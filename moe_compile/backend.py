"""The ``moe_rocm`` backend of torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moe_compile import packed_weights, report
from moe_compile.errors import MoeCompileError, OptionError
from moe_compile.options import CompileOptions
from moe_compile.passes.fusion_pass import MoEFusionPass
from moe_compile.report import CompileReport
from moe_compile.torch_internals import CompileTimeError, aot_compile, inductor_compile, mode_patches, user_pre_pass


def moe_rocm(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="moe_rocm", options={...})``: Inductor, with expert blocks made into MXFP8 operators.

    torch.compile finds this by the entry point of the same name. See :class:`moe_compile.options.CompileOptions` for
    ``options``; ``mode`` is torch.compile's.

    Raises:
        OptionError, BackendRefused, RewriteRefused (each a ValueError): at the first call of the compiled model.
    """
    fusion: MoEFusionPass | None = None
    try:
        parsed = CompileOptions.parse(options, mode=mode)
        fusion = MoEFusionPass(parsed, user_pre_pass(_patches(parsed)))
        compiled = _compile(gm, example_inputs, parsed, fusion)
    except MoeCompileError as error:
        raise CompileTimeError.wrap(error) from None
    except Exception:
        if fusion is not None and fusion.error is not None:
            raise CompileTimeError.wrap(fusion.error) from None
        raise
    _record(fusion)
    return _Compiled(compiled, fusion)


def _patches(options: CompileOptions) -> dict[str, Any]:
    patches = mode_patches(options.mode)
    if isinstance(options.inductor, Mapping):
        patches.update(options.inductor)
    return patches


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, fusion: MoEFusionPass
) -> Callable[..., Any]:
    if options.inductor is False:
        if options.mode not in (None, "default"):
            raise OptionError(f"moe_rocm: mode={options.mode!r} needs Inductor, but inductor=False")
        return aot_compile(gm, example_inputs, lambda module, is_inference: _apply(module, fusion, is_inference))
    return inductor_compile(gm, example_inputs, {**_patches(options), "post_grad_custom_pre_pass": fusion})


def _apply(module: torch.fx.GraphModule, fusion: MoEFusionPass, is_inference: bool) -> None:
    fusion(module.graph, is_inference)
    module.recompile()


def _record(fusion: MoEFusionPass) -> None:
    """Report the graphs that the pass has seen since the last call; no graph at all means a warm compile cache."""
    if not fusion.reports:
        report.record(CompileReport(from_cache=1))
    for one in fusion.reports:
        report.record(one)
    fusion.reports.clear()


class _Compiled:
    """The compiled graph. Before each run the packed weights of its arguments are brought up to date."""

    def __init__(self, compiled: Callable[..., Any], fusion: MoEFusionPass) -> None:
        self._compiled = compiled
        self._fusion = fusion
        self._watch = packed_weights.Watch()

    def __call__(self, *args: Any) -> Any:
        self._watch(args)
        result = self._compiled(*args)
        if self._fusion.reports:  # a backward graph, compiled on the first backward pass
            _record(self._fusion)
        return result


def merged(reports: Sequence[CompileReport], note: str | None = None) -> CompileReport:
    """One report over the graphs of one model."""
    one = report.merge(list(reports))
    return one if note is None else dataclasses.replace(one, notes=(*one.notes, note))
