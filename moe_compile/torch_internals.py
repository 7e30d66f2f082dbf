"""Every private name of PyTorch that this package uses, in one place.

A release that moves one of them fails here, at import, with a sentence that says which; nothing else in the package
imports from ``torch._*``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import FrameSummary
from types import CodeType
from typing import Any, cast

import torch

from moe_compile.errors import MoeCompileError

try:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.comptime import ComptimeContext, comptime
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.exc import ShortenTraceback
    from torch._dynamo.utils import counters, reset_graph_break_dup_checker
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._guards import CompileContext, TracingContext
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._logging._internal import trace_structured
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as error:  # pragma: no cover - needs a torch release that moved the name
    raise MoeCompileError(
        f"this torch ({torch.__version__}) lacks an internal that moe_compile uses: {error}. "
        "moe_compile supports torch 2.11 to 2.13; install one of those or a newer moe_compile."
    ) from error

try:
    # torch >= 2.12 tells a pass whether the graph is an inference graph; 2.11 says so in the tracing context.
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as GraphPassBase
except ImportError:
    GraphPassBase = CustomGraphPass  # type: ignore[misc,assignment]

__all__ = [
    "CompileTimeError",
    "ComptimeContext",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "GraphPassBase",
    "OpOverload",
    "aot_compile",
    "as_not_compiled",
    "break_frames",
    "break_messages",
    "cache_hits",
    "config_names",
    "compile_id",
    "comptime",
    "fake_mode_of",
    "frame_id",
    "graph_breaks",
    "guards_of",
    "inductor_compile",
    "is_backward_graph",
    "is_inference_graph",
    "isolated_compile",
    "mode_patches",
    "on_storage_death",
    "real_tensors",
    "register_bytecode_hook",
    "run_user_pass",
    "size_hint",
    "static_placeholders",
    "statically_known_true",
    "storage_address",
    "trace_artifact",
    "traced_module",
    "traced_tensor",
    "unknown_config_names",
    "user_pre_passes",
    "version_of",
    "without_caches",
]


class CompileTimeError(ShortenTraceback):
    """Mixed into an error of ours, this makes Dynamo hand it to the user as it is, not as BackendCompilerFailed."""

    @classmethod
    def wrap(cls, error: MoeCompileError) -> MoeCompileError:
        """The same error (same type for ``except``, same name and text) in a form that Dynamo passes through."""
        original = type(error)
        members = {"__module__": original.__module__, "__reduce__": lambda self: (original, self.args)}
        kind = type(original.__name__, (cls, original), members)
        wrapped: MoeCompileError = kind(str(error), first_useful_frame=None)
        return wrapped


def mode_patches(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor config patches of a torch.compile mode."""
    return dict(list_mode_options(mode, dynamic)) if mode else {}


def unknown_config_names(patches: Mapping[str, Any]) -> list[str]:
    """Those names that are no Inductor config. Aliases are in no listing of configs, so patching itself is asked."""
    unknown = []
    for name, value in patches.items():
        try:
            with inductor_config.patch({name: value}):
                pass
        except AttributeError:
            unknown.append(name)
    return unknown


def config_names() -> list[str]:
    """Every Inductor config name."""
    return list(inductor_config.get_config_copy())


def user_pre_passes(patches: Mapping[str, Any]) -> tuple[Any, ...]:
    """The user's own ``post_grad_custom_pre_pass``: from the patches, else from the global Inductor config."""
    found = patches.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def run_user_pass(user_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
    """Run one of the user's passes as Inductor would have."""
    if GraphPassBase is not CustomGraphPass and isinstance(user_pass, GraphPassBase):
        user_pass(graph, is_inference=is_inference)
    else:
        user_pass(graph)


# Told once for each compiled ATen graph, with Inductor's output code; returns what is told the first run's arguments.
GraphObserver = Callable[[str | None], Callable[[Sequence[Any]], None]]


def inductor_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    observer: GraphObserver | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor under config patches that do not outlive this compile."""
    watched: dict[str, Any] = {} if observer is None else {"inner_compile": _observed(observer)}
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=dict(patches), **watched)
    return cast(Callable[..., Any], compiled)


def _observed(observer: GraphObserver) -> Callable[..., Any]:
    def inner_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        compiled: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        first_run = observer(getattr(compiled, "source_code", None))
        if getattr(compiled, "current_callable", None) is not None:
            compiled.current_callable = _tell_first(compiled.current_callable, first_run)
        return compiled

    return inner_compile


def _tell_first(function: Callable[..., Any], first_run: Callable[[Sequence[Any]], None]) -> Callable[..., Any]:
    told = False

    def run(inputs: Sequence[Any]) -> Any:
        nonlocal told
        if not told:
            told = True
            first_run(inputs)
        return function(inputs)

    return run


def aot_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    transform: Callable[[torch.fx.GraphModule, bool], None],
    observer: GraphObserver | None = None,
) -> Callable[..., Any]:
    """AOTAutograd only: ``transform(graph_module, is_inference)`` edits each graph, which then runs as it stands."""

    def compiler(is_inference: bool) -> Callable[..., Any]:
        def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            transform(module, is_inference)
            if observer is None:
                return make_boxed_func(module.forward)
            return make_boxed_func(_tell_first_unboxed(module.forward, observer(None)))

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(False), inference_compiler=compiler(True))
    compiled: Callable[..., Any] = backend(gm, list(example_inputs))
    return compiled


def _tell_first_unboxed(function: Callable[..., Any], first_run: Callable[[Sequence[Any]], None]) -> Callable[..., Any]:
    run = _tell_first(lambda inputs: function(*inputs), first_run)
    return lambda *inputs: run(inputs)


def compile_id() -> object | None:
    """What identifies the frame that Dynamo is compiling in this thread; None outside of a compile."""
    found: object | None = CompileContext.current_compile_id()
    return found


def guards_of(code: CodeType) -> list[str]:
    """The guards of each version of a function that Dynamo has compiled, as text."""
    return [str(entry.guard_manager) for entry in _debug_get_cache_entry_list(code) if entry.guard_manager is not None]


def trace_artifact(name: str, text: str) -> None:
    """Hand a text to torch's structured trace (``TORCH_TRACE``), where ``tlparse`` shows it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def size_hint(size: Any) -> Any:
    """A size as a number; of a symbolic one the value it had while tracing, without adding a guard."""
    node = getattr(size, "node", None)
    return size if node is None else node.hint


def is_inference_graph() -> bool:
    """For torch 2.11, whose passes are not told: whether AOTAutograd is compiling a graph without gradients."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata is not None and not getattr(metadata, "is_train", True)


def is_backward_graph(graph: torch.fx.Graph) -> bool:
    """Whether AOTAutograd made this as a backward graph: it takes tangents, under that name."""
    return any("tangents" in str(node.target) for node in graph.nodes if node.op == "placeholder")


def static_placeholders(graph: torch.fx.Graph) -> set[torch.fx.Node] | None:
    """Placeholders that hold parameters, buffers or other tensors of fixed address; None if that is not known."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    indices = getattr(metadata, "static_input_indices", None)
    if indices is None:
        return None
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return {placeholders[i] for i in indices if i < len(placeholders)}


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode that made one of these values."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors inside of a compile, where a fake mode is active."""
    with _disable_current_modes():
        yield


def traced_module(context: ComptimeContext, name: str) -> torch.nn.Module:
    """The module in a local variable of the code that Dynamo is tracing and whose ``comptime(f)`` called us."""
    # torch 2.11 takes no module as an argument of torch.compiler.assume_constant_result.
    module: torch.nn.Module = context.get_local(name)._ComptimeVar__variable.value  # type: ignore[attr-defined]
    return module


def traced_tensor(context: ComptimeContext, name: str) -> torch.Tensor:
    """The fake tensor that stands for a local variable of the code that Dynamo is tracing."""
    return cast(torch.Tensor, context.get_local(name).as_fake())


def graph_breaks() -> dict[str, int]:
    """How often Dynamo broke a graph in this process, by reason, one line each.

    A break inside of a loop makes Dynamo skip the whole function: those are counted elsewhere, under all that it says.
    """
    found: dict[str, int] = {}
    for text, count in counters["graph_break"].items():
        reason = text.strip().splitlines()[0]
        found[reason] = found.get(reason, 0) + count
    for text, count in counters["unimplemented"].items():
        skipped = re.search(r"frame skipped: (\w+) \((?:\S*/)?([^/\s]+) line (\d+)\)", text)
        if skipped:
            function, file, line = skipped.groups()
            reason = text.strip().splitlines()[0]
            reason += f", in a loop of {function} ({file}:{line}), which runs uncompiled"
            found[reason] = found.get(reason, 0) + count
    return found


# torch's names for the loggers behind TORCH_LOGS="graph_breaks".
_BREAK_LOGGERS = tuple(f"torch._dynamo.{module}.__graph_breaks" for module in ("symbolic_convert", "convert_frame"))


@contextlib.contextmanager
def break_messages() -> Iterator[list[str]]:
    """What Dynamo logs of each graph break while the block runs: its reason and the traceback of the user's code.

    Nothing of it is printed that would not be otherwise.
    """
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, _BREAK_LOGGERS):
            before = logger.level, logger.propagate, list(logger.handlers)
            stack.callback(_restore_logger, logger, *before)
            if not logger.isEnabledFor(logging.DEBUG):
                logger.propagate, logger.handlers = False, []
                logger.setLevel(logging.DEBUG)
            logger.addHandler(handler)
        reset_graph_break_dup_checker()  # else a place that was logged before comes without its traceback
        yield found


def break_frames(gm: torch.fx.GraphModule) -> list[FrameSummary]:
    """The user's frames, outermost first, at the graph break with which Dynamo's graph ends; none if it ended whole."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return list(reason.user_stack) if reason is not None and reason.graph_break else []


def _restore_logger(logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    logger.propagate, logger.handlers = propagate, handlers
    logger.setLevel(level)


def frame_id() -> object | None:
    """What identifies the function that Dynamo is compiling in this thread, whichever version of it."""
    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def cache_hits() -> int:
    """How many graphs Inductor or AOTAutograd took from their caches in this process."""
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


_CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # torch >= 2.12


def isolated_compile(model: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` whose graphs do not count towards the recompile limit of the model's other compiles."""
    if _CAN_ISOLATE:
        isolated: dict[str, Any] = {"isolate_recompiles": True}
        return torch.compile(model, backend=backend, **isolated)

    # Dynamo counts by code object: give the outermost frame, into which it inlines the others, one of its own.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=backend)


@contextlib.contextmanager
def as_not_compiled(model: object) -> Iterator[None]:
    """Calls of modules that were compiled in place, ``module.compile(...)``, run (and trace) their own code here."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    compiled = {module: module._compiled_call_impl for module in modules if module._compiled_call_impl is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Compile from scratch: neither read nor write the FX graph and AOTAutograd caches."""
    with inductor_config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


def on_storage_death(tensor: torch.Tensor, callback: Callable[[], None]) -> weakref.finalize[Any, Any]:
    """Call ``callback`` once when the memory behind ``tensor`` is freed (the last tensor or view of it is gone)."""
    finalizer = weakref.finalize(tensor.untyped_storage(), callback)
    finalizer.atexit = False
    return finalizer


def storage_address(tensor: torch.Tensor) -> int:
    """Identity of the storage object. Not reused while a weak reference to it is held (``on_storage_death`` does)."""
    address: int = tensor.untyped_storage()._cdata
    return address


def version_of(tensor: torch.Tensor) -> int:
    """The in-place version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else int(tensor._version)
