"""The ``moe_rocm`` backend of torch.compile."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_compile import packed_weights, report
from moe_compile.errors import MoeCompileError, OptionError, nearest
from moe_compile.options import CompileOptions
from moe_compile.passes.fusion_pass import MoEFusionPass
from moe_compile.report import CompileReport
from moe_compile.sharding import sharded_inputs
from moe_compile.torch_internals import (
    CompileTimeError,
    aot_compile,
    cache_hits,
    config_names,
    inductor_compile,
    mode_patches,
    unknown_config_names,
    user_pre_passes,
    without_caches,
)

if TYPE_CHECKING:
    from moe_compile.dump_graph import GraphDump


def moe_rocm(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="moe_rocm", options={...})``: Inductor, with expert blocks as MXFP8 operators.

    torch.compile finds this by the entry point of the same name. See :class:`moe_compile.options.CompileOptions` for
    ``options``; ``mode`` is torch.compile's.

    Raises:
        OptionError, BackendRefused, RewriteRefused (each a ValueError): at the first call of the compiled model.
    """
    try:
        compiled, _ = compile_graph(gm, example_inputs, CompileOptions.parse(options, mode=mode))
    except MoeCompileError as error:
        raise CompileTimeError.wrap(error) from None
    return compiled


def compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions
) -> tuple[Callable[..., Any], CompileReport]:
    """Compile one graph that Dynamo captured; the report is recorded for :func:`moe_compile.reports`, too.

    Raises:
        OptionError, BackendRefused, RewriteRefused (each a ValueError).
    """
    patches = _patches(options)
    dump = _dump(gm, options)
    fusion = MoEFusionPass(options, user_pre_passes(patches), dump, sharded_inputs(example_inputs))
    observer = None if dump is None else dump.compiled
    hits = cache_hits()
    try:
        with without_caches() if options.dump_dir is not None or options.verify else contextlib.nullcontext():
            if options.inductor is False:
                transform = functools.partial(_apply, fusion)
                compiled = aot_compile(gm, example_inputs, transform, observer)
            else:
                patches["post_grad_custom_pre_pass"] = fusion
                compiled = inductor_compile(gm, example_inputs, patches, observer)
    except Exception:
        if fusion.error is not None:
            raise fusion.error from None
        raise
    found = _one_report(fusion.reports, from_cache=cache_hits() > hits)
    report.record(found)
    if dump is not None:
        dump.finished(found)
        compiled = _dumping(compiled, dump)
    return _Compiled(compiled), found


def _dump(gm: torch.fx.GraphModule, options: CompileOptions) -> GraphDump | None:
    if options.dump_dir is None:
        return None
    from moe_compile.dump import dump_to  # depyf and safetensors, which nobody else needs

    return dump_to(os.fspath(options.dump_dir)).graph(gm)


def _dumping(compiled: Callable[..., Any], dump: GraphDump) -> Callable[..., Any]:
    """The same, with the first run recorded."""
    recorded = False

    def run(*args: Any) -> Any:
        nonlocal recorded
        if recorded:
            return compiled(*args)
        recorded = True
        dump.record_inputs("dynamo", args)
        result = compiled(*args)
        dump.first_run_done()
        return result

    return run


def _patches(options: CompileOptions) -> dict[str, Any]:
    if options.inductor is False:
        if options.mode not in (None, "default"):
            raise OptionError(f"moe_rocm: mode={options.mode!r} needs Inductor, but inductor=False")
        return {}
    patches = mode_patches(options.mode)
    if isinstance(options.inductor, Mapping):
        for name in unknown_config_names(options.inductor):
            raise OptionError(
                f"moe_rocm: inductor={{{name!r}: ...}} is no Inductor config; see torch._inductor.config."
                + nearest(name, config_names())
            )
        patches.update(options.inductor)
    if not patches.get("use_post_grad_passes", True):
        raise OptionError(
            "moe_rocm: inductor={'use_post_grad_passes': False} switches off the pass that rewrites the experts. "
            "Leave it out, or compile with backend='inductor'"
        )
    return patches


def _apply(fusion: MoEFusionPass, module: torch.fx.GraphModule, is_inference: bool) -> None:
    fusion(module.graph, is_inference)
    module.recompile()


def _one_report(reports: Sequence[CompileReport], from_cache: bool) -> CompileReport:
    """Inductor runs the pass on subgraphs as well, and on no graph at all if its cache has the result."""
    if not reports:
        return CompileReport(from_cache=int(from_cache))
    return CompileReport(
        layers=tuple(layer for one in reports for layer in one.layers),
        target=", ".join(dict.fromkeys(one.target for one in reports if one.target)),
        seconds=sum(one.seconds for one in reports),
        notes=tuple(dict.fromkeys(note for one in reports for note in one.notes)),
    )


class _Compiled:
    """The compiled graph. Before each run the packed weights of its arguments are brought up to date."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled
        self._watch = packed_weights.Watch()

    def __call__(self, *args: Any) -> Any:
        return self._watch.run(self._compiled, args)
