"""What happened to each expert block: ``CompileReport`` and the reports of this process."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from moe_compile.remedies import remedy
from moe_compile.selection import Rejection
from moe_compile.spec import ExpertSpec

logger = logging.getLogger("moe_compile")


@dataclass(frozen=True)
class LayerReport:
    """One expert block that was found in a graph.

    ``name``: module path such as ``model.layers.3.mlp.experts``; ``form``: the spelling that was recognised;
    ``spec``: sizes, layout and gate function, None if they could not be proven; ``moe_backend``: what runs it, None if
    it was left alone; ``rejected``: each backend that was passed over and why; ``reason``: why it was left alone;
    ``node``: the graph node at which the proof stopped; ``location``: the line of the model's code behind it.
    """

    name: str
    form: str
    spec: ExpertSpec | None = None
    moe_backend: str | None = None
    rejected: tuple[Rejection, ...] = ()
    reason: str | None = None
    node: str | None = None
    location: str | None = None

    @property
    def rewritten(self) -> bool:
        return self.moe_backend is not None

    @property
    def remedy(self) -> str | None:
        """What to do about a block that was left alone."""
        return None if self.reason is None else remedy(self.reason)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "name": self.name,
            "form": self.form,
            "spec": self.spec.to_dict() if self.spec else None,
            "moe_backend": self.moe_backend,
            "rejected": [{"backend": r.backend, "reason": r.reason, "remedy": r.remedy} for r in self.rejected],
            "reason": self.reason,
            "remedy": self.remedy,
            "node": self.node,
            "location": self.location,
        }


@dataclass(frozen=True)
class CompileReport:
    """All expert blocks of one compiled graph, or of several graphs merged by :func:`merge`.

    ``from_cache`` counts graphs that Inductor took from its cache: the pass did not run for them in this process, so
    their blocks are not listed (they hold the rewrite of the process that filled the cache). ``explain`` compiles
    without caches and always lists every block. ``seconds`` is the time spent in the pass alone.

    Of ``explain`` alone: ``recompiles`` counts graphs that Dynamo captured again for a function that it had compiled,
    ``packed_bytes`` is the memory of the weights that the call packed, ``total_seconds`` the time of compiling and
    running.
    """

    layers: tuple[LayerReport, ...] = ()
    target: str = ""
    graphs: int = 1
    from_cache: int = 0
    seconds: float = 0.0
    recompiles: int = 0
    packed_bytes: int = 0
    total_seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def rewritten(self) -> int:
        return sum(layer.rewritten for layer in self.layers)

    @property
    def skipped(self) -> int:
        return len(self.layers) - self.rewritten

    def summary(self) -> str:
        """``2/2 expert blocks -> triton``: the line that is logged once per compile."""
        if not self.layers and self.from_cache and self.from_cache == self.graphs:
            return "graph taken from the compile cache, compiled with these options and this version"
        if not self.layers:
            return "no expert blocks found"
        names = sorted({layer.moe_backend for layer in self.layers if layer.moe_backend})
        arrow = f" -> {', '.join(names)}" if names else ""
        return f"{self.rewritten}/{len(self.layers)} expert blocks{arrow}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "rewritten": self.rewritten,
            "skipped": self.skipped,
            "target": self.target,
            "graphs": self.graphs,
            "from_cache": self.from_cache,
            "seconds": self.seconds,
            "recompiles": self.recompiles,
            "packed_bytes": self.packed_bytes,
            "total_seconds": self.total_seconds,
            "notes": list(self.notes),
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160, force_terminal=False, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The table, then one paragraph per block that was left alone, then the notes."""
        from rich.table import Table
        from rich.text import Text

        title = f"moe_rocm: {self.summary()}" + (f" on {self.target}" if self.target else "")
        if self.layers:
            # Text, not str: names and reasons may hold [brackets] and :colons: that rich would read as markup.
            table = Table(title=Text(title), title_justify="left", title_style="bold")
            for column in ("layer", "form", "sizes", "gate function", "backend"):
                table.add_column(column, overflow="fold")
            for layer in self.layers:
                sizes, gate = (layer.spec.sizes, str(layer.spec.gate)) if layer.spec else ("?", "?")
                if layer.spec and layer.spec.up_first:
                    gate += ", up rows first"
                backend = layer.moe_backend or "left alone"
                table.add_row(*(Text(cell) for cell in (layer.name, layer.form, sizes, gate, backend)))
            yield table
        else:
            yield Text(title)
        for layer in self.layers:
            if layer.reason:
                where = f"\n    at {layer.location}" if layer.location else ""
                node = f" [graph node {layer.node}]" if layer.node else ""
                yield Text(f"  {layer.name}: left alone: {layer.reason}{node}{where}\n    remedy: {layer.remedy}")
        passed_over = dict.fromkeys(str(r) for layer in self.layers if layer.rewritten for r in layer.rejected)
        if passed_over:
            yield Text("backends passed over:")
            for line in passed_over:
                yield Text(f"  {line}")
        if self.total_seconds:
            yield Text(
                f"{counted(self.graphs, 'graph')}, {counted(self.recompiles, 'recompile')}; packed weights: "
                f"{_size(self.packed_bytes)}; {self.total_seconds:.1f} s, {self.seconds:.2f} s of them in the pass"
            )
        for note in self.notes:
            yield Text(f"note: {note}")


def counted(number: int, what: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def _size(nbytes: int) -> str:
    """``24 KiB``, ``1.5 MiB``, ``3.2 GiB``."""
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"


def merge(reports: list[CompileReport]) -> CompileReport:
    """One report over several graphs, in their order. A block seen again with the same outcome is listed once."""
    layers = tuple(dict.fromkeys(layer for report in reports for layer in report.layers))
    return CompileReport(
        layers=layers,
        target=", ".join(dict.fromkeys(report.target for report in reports if report.target)),
        graphs=sum(report.graphs for report in reports),
        from_cache=sum(report.from_cache for report in reports),
        seconds=sum(report.seconds for report in reports),
        recompiles=sum(report.recompiles for report in reports),
        packed_bytes=sum(report.packed_bytes for report in reports),
        total_seconds=sum(report.total_seconds for report in reports),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


_lock = threading.Lock()
_reports: list[CompileReport] = []
_collectors: list[list[CompileReport]] = []


def reports() -> list[CompileReport]:
    """One report per graph compiled in this process with ``backend="moe_rocm"``, oldest first."""
    with _lock:
        return list(_reports)


def record(report: CompileReport) -> None:
    """Keep a report, hand it to every open :func:`collecting` and log its one line."""
    with _lock:
        _reports.append(report)
        for collector in _collectors:
            collector.append(report)
    skipped = [layer for layer in report.layers if layer.reason]
    if not skipped:
        logger.info("moe_rocm: %s", report.summary())
        return
    first, more = skipped[0], f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
    logger.info("moe_rocm: %s; %s left alone: %s%s", report.summary(), first.name, first.reason, more)
    for layer in skipped:
        logger.debug("moe_rocm: %s left alone at %s: %s", layer.name, layer.node, layer.reason)


@contextlib.contextmanager
def collecting() -> Iterator[list[CompileReport]]:
    """The reports recorded while the block runs."""
    found: list[CompileReport] = []
    with _lock:
        _collectors.append(found)
    try:
        yield found
    finally:
        with _lock:
            # By identity: two open collectors are often equal lists.
            _collectors[:] = [collector for collector in _collectors if collector is not found]


def clear() -> None:
    """Forget all reports (tests use it between cases)."""
    with _lock:
        _reports.clear()


def with_note(report: CompileReport, note: str) -> CompileReport:
    return replace(report, notes=(*report.notes, note))
