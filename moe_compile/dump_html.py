"""index.html of a dump: every block drawn before and after the pass, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from moe_compile.dump_blocks import BlockNode, DumpedBlock
from moe_compile.dump_code import printable
from moe_compile.dump_graph import GraphDump
from moe_compile.dump_layout import BOX_HEIGHT, draw
from moe_compile.dump_page import PAGE
from moe_compile.report import CompileReport, LayerReport


def page(report: CompileReport, graphs: Sequence[GraphDump]) -> str:
    """The whole page. Every name out of the model is escaped; a content security policy forbids all requests."""
    links, sections = [], []
    for graph in graphs:
        blocks = iter(graph.blocks)
        for number, layer in enumerate(graph.report.layers if graph.report is not None else ()):
            block = next(blocks, None) if layer.rewritten and layer.form != "experts_operator" else None
            identity = f"g{graph.number}b{number}"
            links.append(_link(identity, graph, layer))
            sections.append(_section(identity, graph, layer, block))
    heading = f"moe_rocm: {report.summary()}" + (f" on {report.target}" if report.target else "")
    notes = [*report.notes, *dict.fromkeys(f"not complete: {p}" for graph in graphs for p in graph.problems)]
    return (
        PAGE.replace("%HEADING%", _text(heading))
        .replace("%NOTES%", "".join(f"<p class=note>{_text(note)}</p>" for note in notes))
        .replace("%FILES%", "".join(_files(graph.folder) for graph in graphs))
        .replace("%LINKS%", "".join(links))
        .replace("%SECTIONS%", "".join(sections) or "<p>No expert block was found.</p>")
    )


def _text(text: str) -> str:
    # The placeholders of the page are replaced one after the other, so none may come out of a name.
    return escape(printable(text)).replace("%", "&#37;")


def _link(identity: str, graph: GraphDump, layer: LayerReport) -> str:
    kind = "done" if layer.rewritten else "left"
    outcome = layer.moe_backend or "left alone"
    return (
        f'<li data-name="{_text(layer.name.lower())}"><a href="#{identity}"><span class=name>{_text(layer.name)}</span>'
        f'<span class="outcome {kind}">{_text(outcome)}</span>'
        f"<span class=where>{_text(graph.folder.name)}</span></a></li>"
    )


def _section(identity: str, graph: GraphDump, layer: LayerReport, block: DumpedBlock | None) -> str:
    facts = [("form", layer.form), ("graph", graph.folder.name), ("backend", layer.moe_backend or "left alone")]
    if layer.spec is not None:
        gate = str(layer.spec.gate) + (", up rows first" if layer.spec.up_first else "")
        facts += [("sizes", layer.spec.sizes), ("gate function", gate)]
    if layer.reason:
        facts.append(("reason", layer.reason))
    if layer.node:
        facts.append(("graph node", layer.node))
    if layer.location:
        facts.append(("source", layer.location))
    listed = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    if layer.rejected:
        reasons = "".join(f"<p>{_text(str(rejection))}</p>" for rejection in layer.rejected)
        listed += (
            f"<dt>passed over</dt><dd><details><summary>{len(layer.rejected)} reasons</summary>{reasons}</details></dd>"
        )
    drawing = "<p>Not rewritten, so there is nothing to compare.</p>" if block is None else _views(block)
    return f'<section id="{identity}"><h2>{_text(layer.name)}</h2><dl>{listed}</dl>{drawing}</section>'


def _views(block: DumpedBlock) -> str:
    before = sum(node.operator != "input" for node in block.before)
    after = sum(node.operator != "input" for node in block.after)
    return (
        "<div class=views role=group aria-label=view>"
        f"<button type=button data-view=before>before: {before} nodes</button>"
        f"<button type=button data-view=after>after: {after} node{'s' if after != 1 else ''}</button>"
        "<button type=button data-view=code>code, side by side</button></div>"
        f"<div class=view data-view=before>{svg(block.before, 'before')}</div>"
        f"<div class=view data-view=after>{svg(block.after, 'after')}</div>"
        f"<div class=view data-view=code><div class=columns>{_code('aten_before.py', block.lines_before)}"
        f"{_code('aten_after.py', block.lines_after)}</div></div>"
    )


def _code(title: str, lines: Sequence[str]) -> str:
    return f"<div><h3>{title}</h3><ol>{''.join(f'<li><code>{_text(line)}</code></li>' for line in lines)}</ol></div>"


def svg(nodes: Sequence[BlockNode], title: str) -> str:
    """An inline drawing; a box's tooltip holds its whole name, operator and shape."""
    labels = [_label(node) for node in nodes]
    drawing = draw(nodes, labels)
    parts = [
        f'<svg role=img aria-label="{title}" viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}" '
        f'width="{drawing.width:.0f}" height="{drawing.height:.0f}">'
    ]
    parts += [f'<path d="{_curve(points)}"/>' for points in drawing.edges]
    for box, (first, second) in zip(drawing.boxes, labels, strict=True):
        tip = f"{box.node.name} = {box.node.operator} {box.node.shape}"
        parts.append(
            f'<g class="{_kind(box.node)}" transform="translate({box.x - box.width / 2:.0f} {box.y:.0f})">'
            f"<title>{_text(tip)}</title>"
            f'<rect width="{box.width:.0f}" height="{BOX_HEIGHT}" rx="6"/>'
            f'<text x="{box.width / 2:.0f}" y="17">{_text(first)}</text>'
            f'<text class=shape x="{box.width / 2:.0f}" y="32">{_text(second)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _label(node: BlockNode) -> tuple[str, str]:
    if node.operator == "input":
        return (_shortened(node.name, 26), node.shape)
    parts = node.operator.split(".")
    if len(parts) > 2 and parts[0] in ("aten", "prims", "moe_compile"):
        return (parts[1], node.shape)
    return (_shortened(parts[-1].removeprefix("<built-in function ").removesuffix(">"), 26), node.shape)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"...{text[3 - length :]}"


def _kind(node: BlockNode) -> str:
    """The colour: what a node is to an expert block."""
    if node.operator == "input":
        return "input"
    if node.operator.startswith("moe_compile."):
        return "expert"
    if any(part in node.operator for part in ("grouped_mm", ".bmm", ".mm.", "addmm", "baddbmm")):
        return "gemm"
    if node.shape.startswith(("i64", "i32")) or any(p in node.operator for p in ("sort", "index", "gather", "histc")):
        return "routing"
    return "other"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        middle = (y0 + y1) / 2
        path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    return path


def _files(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"<p>{folder.name}: " + ", ".join(f'<a href="{folder.name}/{name}">{name}</a>' for name in names) + "</p>"
