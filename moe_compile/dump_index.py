"""index.md of a dump: what each file is, and what happened to each expert block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from moe_compile.dump_code import printable
from moe_compile.dump_graph import GraphDump
from moe_compile.report import CompileReport

_WHAT = (
    (r"dynamo\.py", "the graph that Dynamo captured"),
    (r"aten\d*_before\.py", "the ATen graph before the pass"),
    (r"aten\d*_after\.py", "the ATen graph after the pass"),
    (r"block\d+\.diff", "one rewritten block, before and after"),
    (r"inductor\d*\.py", "Inductor's output code"),
    (r"bytecode\.py", "what Dynamo made of the Python function, decompiled by depyf"),
    (r"guards\.txt", "when Dynamo may reuse it"),
    (r".*\.inputs\.safetensors", "inputs of the first run"),
    (r".*\.outputs\.safetensors", "what the graph of that name gives for them"),
    (r"run_graph\.py", "helper of the graph files"),
)


def markdown(report: CompileReport, graphs: Sequence[GraphDump], folder: Path) -> str:
    """The page; names out of the model are escaped."""
    lines = ["# moe_compile dump", "", escaped(f"moe_rocm: {report.summary()}" + _on(report)), ""]
    lines += ["[index.html](index.html) draws the blocks, [report.json](report.json) holds the report."]
    lines += ["Run a graph file with `python FILE`.", ""]
    for graph in graphs:
        name = graph.folder.name
        lines += [f"## {name}", ""]
        if graph.report is not None and graph.report.layers:
            lines += ["| block | form | sizes | gate function | outcome |", "|---|---|---|---|---|"]
            for layer in graph.report.layers:
                sizes, gate = (layer.spec.sizes, str(layer.spec.gate)) if layer.spec else ("?", "?")
                outcome = layer.moe_backend or f"left alone: {layer.reason}"
                lines.append("| " + " | ".join(map(escaped, (layer.name, layer.form, sizes, gate, outcome))) + " |")
            lines.append("")
        for file in sorted(graph.folder.iterdir()):
            lines.append(f"- [{file.name}]({name}/{file.name}): {what_it_is(file.name, graph)}")
        lines += ["", *(f"Not complete: {escaped(problem)}" for problem in graph.problems), ""]
    kernels = folder / "kernels"
    lines += ["## Kernels", ""]
    if kernels.is_dir():
        lines += [f"- [{file.name}](kernels/{file.name})" for file in sorted(kernels.iterdir())]
    else:
        lines.append("Sources and assembly of the Triton kernels: not available on this machine, no GPU ran them.")
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {escaped(note)}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def what_it_is(name: str, graph: GraphDump) -> str:
    """One phrase about a file of a graph's folder."""
    block = re.fullmatch(r"block(\d+)\.diff", name)
    if block:
        return escaped(graph.blocks[int(block[1])].name) + ", before and after"
    return next(what for pattern, what in _WHAT if re.fullmatch(pattern, name))


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML and no table cell out of a model's names."""
    return re.sub(r"([\\`*_{}\[\]<>#|!&])", r"\\\1", " ".join(printable(text).split()))


def _on(report: CompileReport) -> str:
    return f" on {report.target}" if report.target else ""
