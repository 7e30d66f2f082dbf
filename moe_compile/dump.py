"""``dump_dir``: what Dynamo captured, what the pass made of it and what Inductor made of that, as files.

```
DIR/rank0/                      a second dump into DIR goes to rank0_run2; nothing is ever overwritten
    index.md  index.html  report.json
    graph0/                     one for each graph that Dynamo captured
        dynamo.py  aten_before.py  aten_after.py    run as `python FILE`; run_graph.py is their helper
        *.inputs.safetensors  *.outputs.safetensors recorded at the first run
        block0.diff             a rewritten expert block, before and after
        inductor.py             Inductor's output code
        bytecode.py  guards.txt what Dynamo made of the frame
    kernels/                    sources and assembly of our Triton kernels, where a GPU ran them
```

Names of files are fixed or numbered: no name out of a model ever becomes a path.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path

import torch

from moe_compile import dump_html, dump_index, report
from moe_compile.dump_graph import GraphDump
from moe_compile.dump_kernels import write_kernels
from moe_compile.errors import OptionError
from moe_compile.report import CompileReport

_open: dict[tuple[int, str], Dump] = {}
_lock = threading.Lock()


class Dump:
    """One folder of one rank. Every graph compiled with this ``dump_dir`` in this process goes into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: list[GraphDump] = []
        self.report: CompileReport | None = None

    def graph(self, gm: torch.fx.GraphModule) -> GraphDump:
        """The folder of the next graph, holding what Dynamo captured."""
        with _lock:
            number = len(self.graphs)
            folder = self.folder / f"graph{number}"
            folder.mkdir()
            graph = GraphDump(folder, number, self.write_index)
            self.graphs.append(graph)
        graph.captured(gm)
        return graph

    def finish(self, report: CompileReport) -> None:
        """Put a report of the whole call in place of the graphs' own."""
        self.report = report
        self.write_index()

    def write_index(self) -> None:
        """index.md, index.html and report.json, which grow with each graph."""
        write_kernels(self.folder)
        found = self.report or report.merge([graph.report for graph in self.graphs if graph.report is not None])
        (self.folder / "report.json").write_text(json.dumps(found.to_dict(), indent=2) + "\n")
        (self.folder / "index.html").write_text(dump_html.page(found, self.graphs))
        (self.folder / "index.md").write_text(dump_index.markdown(found, self.graphs, self.folder))


def dump_to(path: str) -> Dump:
    """The dump of this process for the option ``dump_dir=path``, started on first use.

    Raises:
        OptionError: the folder cannot be made.
    """
    key = (os.getpid(), os.path.abspath(path))
    with _lock:
        found = _open.get(key)
    return found or start(path)


def start(path: str) -> Dump:
    """A new folder in ``path``, which later compiles with this ``dump_dir`` use.

    Raises:
        OptionError: the folder cannot be made.
    """
    dump = Dump(_new_folder(path))
    with _lock:
        _open[(os.getpid(), os.path.abspath(path))] = dump
    return dump


def _new_folder(path: str) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        for name in itertools.chain([f"rank{rank()}"], (f"rank{rank()}_run{run}" for run in itertools.count(2))):
            folder = Path(path) / name
            try:
                folder.mkdir()  # atomic: of two processes with one rank, the second gets the next name
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise OptionError(f"moe_rocm: dump_dir={path!r} cannot be written: {error.strerror}") from None
    raise AssertionError("itertools.count ended")


def rank() -> int:
    """This process's rank: torch.distributed's, else the launcher's ``RANK``, else 0.

    Raises:
        OptionError: if ``RANK`` is set to something else than a number.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    text = os.environ.get("RANK", "")
    if text and not text.isdecimal():
        raise OptionError(f"moe_rocm: the variable RANK is {text!r}, which names no folder of a dump: set 0, 1, ...")
    return int(text or 0)


def close_all() -> None:
    """Forget the open dumps: the next compile starts new folders (tests use it between cases)."""
    with _lock:
        _open.clear()
