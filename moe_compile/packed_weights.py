"""Packed (quantised, re-ordered) copies of expert weights: made once, shared by every graph, tied to their sources.

The experts operators take the model's own weight tensors and are pure functions of them; this cache only keeps their
packed form. Four rules make it safe:

- **Identity.** The key is the storage object (not its address), offset, shape, stride, dtype and device of every source
  tensor. An entry dies with the storage of any source, so memory that is freed and reused can never hit.
- **Sharing.** Prefill, decode and every recompile pass the same parameters and so find the same entry.
- **In-place changes** raise a tensor's version counter: the entry is rebuilt in place, at the same addresses, because
  captured graphs read those. ``param.data`` edits raise no counter: call ``moe_compile.refresh(model)`` after them.
- **Graph capture.** An entry is never built while a stream is capturing, and never inside a CUDA-graph memory pool
  (``mode="reduce-overhead"`` warms up inside one): it is built in a thread of its own, which allocates outside.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from moe_compile.errors import PackedWeightsError
from moe_compile.torch_internals import on_storage_death, storage_address, version_of

P = TypeVar("P")
Sources = tuple[torch.Tensor | None, ...]


@dataclass(eq=False)
class Entry(Generic[P]):
    """One packed value; ``versions`` are the sources' version counters when it was last built."""

    key: Hashable
    value: P
    versions: tuple[int, ...]
    rebuild: Callable[[P, Sources], None]
    addresses: frozenset[int] = frozenset()
    finalizers: list[weakref.finalize[Any, Any]] = field(default_factory=list)


_lock = threading.RLock()
_entries: dict[Hashable, Entry[Any]] = {}
_generation = 0


def _tensor_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return (
        storage_address(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def _versions(sources: Sources) -> tuple[int, ...]:
    return tuple(-1 if tensor is None else version_of(tensor) for tensor in sources)


def lookup(
    sources: Sources, layout: Hashable, build: Callable[[Sources], P], rebuild: Callable[[P, Sources], None]
) -> P:
    """The packed form of ``sources`` under ``layout``: built on first use, rebuilt in place after in-place changes.

    Args:
        sources: the model's weight tensors; None for an absent scale or bias.
        layout: everything else that the packed form depends on.
        build: makes the packed value; it must not keep a reference to a source that it copied.
        rebuild: writes the packed form of ``sources`` into an existing value, at the same addresses.

    Raises:
        PackedWeightsError: the value has to be built or rebuilt while the current stream is capturing a graph.
    """
    key = (layout, *map(_tensor_key, sources))
    entry = _entries.get(key)
    versions = _versions(sources)
    if entry is not None and entry.versions == versions:
        value: P = entry.value
        return value
    with _lock:
        entry = _entries.get(key)
        if entry is None:
            _refuse_capture(sources, "packed")
            entry = Entry(key, _outside_graph_pools(sources, lambda: build(sources)), versions, rebuild)
            _register(entry, sources)
        elif entry.versions != versions:
            _update(entry, sources)
        value = entry.value
        return value


def _register(entry: Entry[Any], sources: Sources) -> None:
    global _generation
    tensors = [tensor for tensor in sources if tensor is not None]
    entry.addresses = frozenset(map(storage_address, tensors))
    # One finalizer per storage: the entry is unusable as soon as any source is gone.
    for tensor in {storage_address(t): t for t in tensors}.values():
        entry.finalizers.append(on_storage_death(tensor, lambda key=entry.key: _drop(key)))
    _entries[entry.key] = entry
    _generation += 1


def _drop(key: Hashable) -> None:
    global _generation
    with _lock:
        entry = _entries.pop(key, None)
        if entry is not None:
            _generation += 1
            for finalizer in entry.finalizers:
                finalizer.detach()


def _update(entry: Entry[Any], sources: Sources) -> None:
    _refuse_capture(sources, "packed again, because they changed")
    versions = _versions(sources)
    _outside_graph_pools(sources, lambda: entry.rebuild(entry.value, sources))
    entry.versions = versions


def _refuse_capture(sources: Sources, what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        shapes = ", ".join(str(tuple(t.shape)) for t in sources if t is not None)
        raise PackedWeightsError(
            f"expert weights ({shapes}) must be {what}, which cannot happen while a CUDA graph is being captured. "
            "Call the compiled model once before the capture, and after every change of its weights."
        )


def _outside_graph_pools(sources: Sources, work: Callable[[], P]) -> P:
    """Run ``work`` without gradients; on a GPU in a new thread, ordered after and before the current stream.

    CUDA-graph memory pools take the allocations of the thread that opened them. A pack allocated there would be
    overwritten by later graphs, as the pool counts every block that is not a graph output as free.
    """
    device = next(tensor.device for tensor in sources if tensor is not None)
    if device.type != "cuda":
        with torch.no_grad(), torch.inference_mode(False):
            return work()
    result: list[P] = []
    failure: list[BaseException] = []
    torch.cuda.current_stream(device).synchronize()

    def body() -> None:
        try:
            with torch.cuda.device(device), torch.no_grad():
                result.append(work())
                torch.cuda.current_stream(device).synchronize()
        except BaseException as error:  # handed to the caller's thread below, whatever it is
            failure.append(error)

    thread = threading.Thread(target=body, name="moe_compile-pack")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def refresh(tensors: Iterable[torch.Tensor]) -> int:
    """Rebuild, in place, every entry that was packed from one of these tensors. Returns how many.

    For changes that no version counter shows (``param.data.copy_(...)``), and before replaying a graph that was
    captured by hand.
    """
    by_key = {_tensor_key(tensor): tensor for tensor in tensors}
    count = 0
    with _lock:
        for entry in list(_entries.values()):
            _, *source_keys = entry.key  # type: ignore[misc]
            present = [key for key in source_keys if key is not None]
            if any(key in by_key for key in present):
                missing = [key for key in present if key not in by_key]
                if missing:
                    raise PackedWeightsError(
                        f"refresh: a weight of shape {missing[0][2]} is packed together with one of the given tensors; "
                        "pass the whole model"
                    )
                _update(entry, tuple(None if key is None else by_key[key] for key in source_keys))
                count += 1
    return count


class Watch:
    """Keeps the packs behind one compiled callable fresh, also where a graph replay would skip the operator."""

    def __init__(self) -> None:
        self._generation = -1
        self._watched: list[tuple[Entry[Any], tuple[int | None, ...]]] = []

    def __call__(self, args: Sequence[Any]) -> None:
        """Rebuild each entry whose sources are among ``args`` and changed in place since it was packed."""
        if not _entries:
            return
        if self._generation != _generation:
            self._find(args)
        for entry, positions in self._watched:
            sources = tuple(None if i is None else args[i] for i in positions)
            if entry.versions != _versions(sources):
                with _lock:
                    if entry.key == (entry.key[0], *map(_tensor_key, sources)):  # type: ignore[index]
                        _update(entry, sources)

    def _find(self, args: Sequence[Any]) -> None:
        with _lock:
            self._generation = _generation
            where = {
                _tensor_key(arg): i
                for i, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and arg.layout == torch.strided and not arg.is_meta
            }
            self._watched = []
            for entry in _entries.values():
                _, *source_keys = entry.key  # type: ignore[misc]
                if all(key is None or key in where for key in source_keys):
                    self._watched.append((entry, tuple(None if key is None else where[key] for key in source_keys)))


@dataclass(frozen=True)
class Statistics:
    """``entries`` packs alive, ``nbytes`` bytes in them (bytes shared with the model's own tensors included)."""

    entries: int
    nbytes: int


def statistics() -> Statistics:
    with _lock:
        return Statistics(len(_entries), sum(getattr(entry.value, "nbytes", 0) for entry in _entries.values()))


def clear() -> None:
    """Drop every pack. The next call packs again; graphs captured by hand must be captured again."""
    with _lock:
        for key in list(_entries):
            _drop(key)
