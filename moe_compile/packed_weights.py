"""Packed (quantised, re-ordered) copies of expert weights: made once, shared by every graph, tied to their sources.

The experts operators take the model's own weight tensors and are pure functions of them; this cache only keeps their
packed form. Four rules make it safe:

- **Identity.** The key is the storage object, offset, shape, stride, dtype and device of every source tensor. An entry
  dies with the storage of any source, before that memory can be reused, so a stale hit is impossible.
- **Sharing.** Prefill, decode and every recompile pass the same parameters and so find the same entry.
- **In-place changes** raise a tensor's version counter: the entry is rebuilt in place, at the same addresses, because
  captured graphs read those. ``param.data`` edits raise no counter, and tensors made in inference mode have none: call
  ``moe_compile.refresh(model)`` after changing those.
- **Graph capture.** An entry is never built while a stream is capturing, and never inside a CUDA-graph memory pool
  (``mode="reduce-overhead"`` warms up inside one): it is built in a thread of its own, which allocates outside.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from moe_compile.errors import PackedWeightsError
from moe_compile.sharding import local_part
from moe_compile.torch_internals import on_storage_death, storage_address, version_of

logger = logging.getLogger("moe_compile.packed_weights")

P = TypeVar("P")
T = TypeVar("T")
Sources = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Packing(Generic[P]):
    """How sources become a packed value.

    ``layout`` is everything but the sources that the value depends on. ``build`` makes the value and keeps no reference
    to a source that it copied; ``rebuild`` writes the packed form into an existing value, at the same addresses.
    """

    layout: Hashable
    build: Callable[[Sources], P]
    rebuild: Callable[[P, Sources], None]


@dataclass(eq=False)
class Entry(Generic[P]):
    """One packed value; ``versions`` are the sources' version counters when it was last built."""

    source_keys: tuple[Hashable, ...]
    packing: Packing[P]
    value: P
    versions: tuple[int, ...]
    finalizers: list[weakref.finalize[Any, Any]] = field(default_factory=list)

    @property
    def key(self) -> Hashable:
        return _entry_key(self.packing, self.source_keys)


_lock = threading.Lock()
_entries: dict[Hashable, Entry[Any]] = {}
# A finalizer can run anywhere, also in a thread whose end the holder of the lock awaits: it leaves the dead entry here
# and never waits. Whoever takes or returns the lock drops what is here.
_dead: deque[weakref.ref[Entry[Any]]] = deque()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with _lock:
        _drop_dead()
        yield
    _try_drop_dead()


def _drop_dead() -> None:
    while _dead:
        entry = _dead.popleft()()
        if entry is not None and _entries.get(entry.key) is entry:
            del _entries[entry.key]
            for finalizer in entry.finalizers:
                finalizer.detach()


def _try_drop_dead() -> None:
    # Again after the lock is returned: another thread's finalizer may have found it taken in between.
    while _dead and _lock.acquire(blocking=False):
        try:
            _drop_dead()
        finally:
            _lock.release()


def _source_died(entry: weakref.ref[Entry[Any]]) -> None:
    _dead.append(entry)
    _try_drop_dead()


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


def _entry_key(packing: Packing[Any], source_keys: Iterable[Hashable]) -> Hashable:
    return (packing.layout, *source_keys)


def _versions(sources: Sources) -> tuple[int, ...]:
    return tuple(-1 if tensor is None else version_of(tensor) for tensor in sources)


def lookup(sources: Sources, packing: Packing[P]) -> P:
    """The packed form of ``sources``: built on first use, rebuilt in place after in-place changes of a source.

    Args:
        sources: the model's weight tensors; None for an absent scale or bias.

    Raises:
        PackedWeightsError: the value has to be built or rebuilt while the current stream is capturing a graph.
    """
    value: P = _entry(sources, packing).value
    observer = _observer.get()
    if observer is not None:
        observer.append((sources, packing))
    return value


def _entry(sources: Sources, packing: Packing[P]) -> Entry[P]:
    if _dead:  # before the lookup: a new tensor may live at the address of a dead one
        with _locked():
            pass
    source_keys = tuple(map(_tensor_key, sources))
    key = _entry_key(packing, source_keys)
    entry = _entries.get(key)
    versions = _versions(sources)
    if entry is not None and entry.versions == versions:
        return entry
    with _locked():
        entry = _entries.get(key)
        if entry is None:
            _refuse_capture(sources, "packed")
            value = _outside_graph_pools(sources, lambda: packing.build(sources))
            entry = Entry(source_keys, packing, value, versions)
            _register(entry, sources)
        else:
            _update(entry, sources)
    return entry


def _register(entry: Entry[Any], sources: Sources) -> None:
    tensors = [tensor for tensor in sources if tensor is not None]
    if any(tensor.is_inference() for tensor in tensors):
        logger.warning(
            "expert weights made under torch.inference_mode() have no version counter: after changing them in place, "
            "call moe_compile.refresh(model)"
        )
    # One finalizer per storage: the entry is unusable as soon as any source is gone.
    for tensor in {storage_address(t): t for t in tensors}.values():
        entry.finalizers.append(on_storage_death(tensor, functools.partial(_source_died, weakref.ref(entry))))
    _entries[entry.key] = entry


def _update(entry: Entry[Any], sources: Sources, force: bool = False) -> None:
    versions = _versions(sources)
    if entry.versions == versions and not force:
        return
    _refuse_capture(sources, "packed again, because they changed")
    _outside_graph_pools(sources, lambda: entry.packing.rebuild(entry.value, sources))
    entry.versions = versions


def _refuse_capture(sources: Sources, what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        shapes = ", ".join(str(tuple(t.shape)) for t in sources if t is not None)
        raise PackedWeightsError(
            f"expert weights ({shapes}) must be {what}, which cannot happen while a CUDA graph is being captured. "
            "Call the compiled model once before the capture, and after every change of its weights."
        )


def _outside_graph_pools(sources: Sources, work: Callable[[], T]) -> T:
    """Run ``work`` without gradients; on a GPU in a new thread, ordered after and before the current stream.

    CUDA-graph memory pools take the allocations of the thread that opened them. A pack allocated there would be
    overwritten by later graphs, as the pool counts every block that is not a graph output as free.
    """
    device = next(tensor.device for tensor in sources if tensor is not None)
    if device.type != "cuda":
        with torch.inference_mode(False), torch.no_grad():
            return work()
    result: list[T] = []
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

    For changes that no version counter shows (``param.data.copy_(...)``, inference tensors), and before replaying a
    graph that was captured by hand.

    Raises:
        PackedWeightsError: a source of one of the entries is not among ``tensors``; then nothing was rebuilt.
    """
    parts = map(local_part, tensors)
    by_key = {_tensor_key(tensor): tensor for tensor in parts if _has_plain_storage(tensor)}
    with _locked():
        stale = []
        for entry in list(_entries.values()):
            present = [key for key in entry.source_keys if key is not None]
            missing = [key for key in present if key not in by_key]
            if len(missing) == len(present):
                continue
            if missing:
                shapes = ", ".join(str(key[2]) for key in missing)  # type: ignore[index]
                raise PackedWeightsError(
                    f"refresh: weights of shape {shapes} are packed together with some of the given tensors, but were "
                    "not given; pass the whole model"
                )
            stale.append((entry, tuple(None if key is None else by_key[key] for key in entry.source_keys)))
        for entry, sources in stale:
            _update(entry, sources, force=True)
    return len(stale)


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")


_observer: contextvars.ContextVar[list[tuple[Sources, Packing[Any]]] | None] = contextvars.ContextVar(
    "moe_compile_lookups", default=None
)


@dataclass(eq=False)
class _Watched:
    """One pack that a compiled graph reads: where its sources are among the graph's arguments, and their last state."""

    positions: tuple[int | None, ...]
    packing: Packing[Any]
    entry: weakref.ref[Entry[Any]] | None = None
    addresses: tuple[int, ...] = ()

    def update(self, args: Sequence[Any]) -> None:
        sources = tuple(None if i is None else local_part(args[i]) for i in self.positions)
        entry = None if self.entry is None else self.entry()
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in sources)
        # A living entry has living sources, whose addresses nothing else can have.
        if entry is not None and self.addresses == addresses and entry.versions == _versions(sources):
            return
        self.entry, self.addresses = weakref.ref(_entry(sources, self.packing)), addresses


class Watch:
    """Keeps the packs behind one compiled graph fresh, also where a CUDA-graph replay skips the operator.

    The first run shows which packs the graph reads and which of its arguments they are made of. Before each later run,
    packs of changed weights are rebuilt and packs of new weights are built, outside of any capture. Holds no pack.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] | None = None

    def run(self, compiled: Callable[..., T], args: Sequence[Any]) -> T:
        """``compiled(*args)`` with fresh packs."""
        if self._watched is not None:
            for watched in self._watched:
                watched.update(args)
            return compiled(*args)
        lookups: list[tuple[Sources, Packing[Any]]] = []
        token = _observer.set(lookups)
        try:
            result = compiled(*args)
        finally:
            _observer.reset(token)
        self._watched = _locate(lookups, args)
        return result


def _locate(lookups: Iterable[tuple[Sources, Packing[Any]]], args: Sequence[Any]) -> list[_Watched]:
    parts = {i: local_part(arg) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    where = {_tensor_key(part): i for i, part in parts.items() if _has_plain_storage(part)}
    found: dict[Hashable, _Watched] = {}
    for sources, packing in lookups:
        keys = [None if source is None else _tensor_key(source) for source in sources]
        if all(key is None or key in where for key in keys):
            positions = tuple(None if key is None else where[key] for key in keys)
            found[packing.layout, positions] = _Watched(positions, packing)
    return list(found.values())


@dataclass(frozen=True)
class Statistics:
    """``entries`` packs alive, ``nbytes`` bytes in them (bytes shared with the model's own tensors included)."""

    entries: int
    nbytes: int


def statistics() -> Statistics:
    with _locked():
        values = [entry.value for entry in list(_entries.values())]
    return Statistics(len(values), sum(getattr(value, "nbytes", 0) for value in values))


def clear() -> None:
    """Drop every pack. The next call packs again; graphs captured by hand must be captured again."""
    with _locked():
        _dead.extend(map(weakref.ref, _entries.values()))
        _drop_dead()
