"""The page of a dump, in a real browser: no request, no error, search and toggles; and its drawing by numbers."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dump_models import DropoutExperts, TwoLayers, compile_and_run
from headless_browser import CHROMIUM, MISSING, Page, browser

from moe_compile import dump, dump_html
from moe_compile.dump_blocks import BlockNode
from moe_compile.dump_layout import BOX_HEIGHT, draw
from moe_compile.report import CompileReport, LayerReport

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

DIAMOND = [
    BlockNode("x", "input", "bf16[4]", ()),
    BlockNode("weight", "input", "bf16[4]", ()),
    BlockNode("a", "aten.silu.default", "bf16[4]", ("x",)),
    BlockNode("b", "aten.mul.Tensor", "bf16[4]", ("a", "x")),
    BlockNode("c", "aten.add.Tensor", "bf16[4]", ("b", "weight", "x")),
]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A graph with two rewritten blocks, and one with a block that is left alone."""
    folder = tmp_path_factory.mktemp("dump")
    dump.close_all()
    compile_and_run(TwoLayers(), dump_dir=folder)
    compile_and_run(TwoLayers(DropoutExperts), dump_dir=folder)
    yield folder / "rank0" / "index.html"
    dump.close_all()


@pytest.fixture(scope="module")
def page(dumped: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def visible(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(
        f"[...document.querySelectorAll({selector!r})].filter(e => e.checkVisibility()).map(e => e.textContent)"
    )
    return found


@needs_browser
class TestInABrowser:
    def test_it_loads_without_a_request_and_without_an_error(self, page: Page, dumped: Path) -> None:
        page.requests.clear()
        page.open(dumped)
        assert page.run("document.title") == "moe_compile dump"
        assert [url for url in page.requests if not url.startswith("data:")] == [dumped.as_uri()]
        assert page.errors == []

    def test_a_script_of_the_page_cannot_reach_the_network(self, page: Page, dumped: Path) -> None:
        page.open(dumped)
        page.run("new Image().src = 'http://127.0.0.1:9/x'")
        page.run("new Promise(r => setTimeout(r, 100))")
        assert any("Content Security Policy" in error for error in page.errors)
        page.errors.clear()

    def test_search_finds_a_layer(self, page: Page, dumped: Path) -> None:
        page.open(dumped)
        assert len(visible(page, "#list .name")) == 4
        page.run("document.getElementById('search').focus()")
        page.type("LAYERS.1")
        assert visible(page, "#list .name") == ["layers.1.experts", "layers.1.experts"]
        assert visible(page, "#count") == ["2 of 4 blocks"]
        assert visible(page, "section h2") == ["layers.1.experts"]
        page.type(" nothing")
        assert visible(page, "#list .name") == []
        assert visible(page, "#count") == ["0 of 4 blocks"]
        assert page.errors == []

    def test_before_and_after_can_be_toggled(self, page: Page, dumped: Path) -> None:
        page.open(dumped)
        labels = ("svg text:first-of-type", "section.current .views button")
        assert "_grouped_mm" in visible(page, labels[0])
        assert "reference_experts" not in visible(page, labels[0])
        page.click("section.current button[data-view=after]")
        assert "_grouped_mm" not in visible(page, labels[0])
        assert "reference_experts" in visible(page, labels[0])
        assert visible(page, "button[aria-pressed=true]")[0].startswith("after: ")
        page.click("section.current button[data-view=code]")
        assert visible(page, "svg") == []
        assert any("_grouped_mm.default" in line for line in visible(page, ".view.current code"))
        page.click("section.current button[data-view=before]")
        assert "_grouped_mm" in visible(page, labels[0])
        assert page.errors == []

    def test_a_click_in_the_list_shows_that_block(self, page: Page, dumped: Path) -> None:
        page.open(dumped)
        page.click("#list li:nth-child(2) a")
        assert visible(page, "section h2") == ["layers.1.experts"]

    def test_a_block_that_was_left_alone_says_why(self, page: Page, dumped: Path) -> None:
        page.open(dumped)
        page.click("#list li:last-child a")
        [text] = visible(page, "section")
        assert "left alone" in text
        assert "Not rewritten" in text

    def test_nothing_is_wider_than_the_window(self, page: Page, dumped: Path, tmp_path: Path) -> None:
        page.open(dumped)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000

    def test_names_are_shown_as_they_are(self, page: Page, tmp_path: Path) -> None:
        name = "<img src=x onerror=alert(1)>&amp;%SECTIONS%\"'"
        graph = dump.start(str(tmp_path)).graphs
        assert graph == []
        text = dump_html.page(CompileReport(notes=(name,)), [])
        (tmp_path / "page.html").write_text(text)
        page.open(tmp_path / "page.html")
        assert visible(page, ".note") == [name]
        assert page.errors == []


class TestText:
    def test_it_is_self_contained(self, dumped: Path) -> None:
        text = dumped.read_text()
        assert not re.search(r"https?://|src=|@import|url\(", text)
        assert len(text) < 200_000

    def test_every_name_is_escaped(self) -> None:
        layer = LayerReport("<b>\n'x'", "grouped_mm", reason="<script>", node="<i>", location="<u>")
        section = dump_html._text(layer.name)
        assert section == "&lt;b&gt;\\n&#x27;x&#x27;"

    def test_colours_follow_the_operator(self) -> None:
        text = dump_html.svg([BlockNode("m", "aten._grouped_mm.default", "bf16[4, 4]", ("<x>",))], "before")
        assert '<g class="gemm"' in text
        assert "<title>m = aten._grouped_mm.default bf16[4, 4]</title>" in text


class TestLayout:
    def test_rows_follow_the_longest_path(self) -> None:
        drawing = draw(DIAMOND, [(node.name, node.shape) for node in DIAMOND])
        rows = {box.node.name: box.y for box in drawing.boxes}
        assert rows["x"] < rows["a"] < rows["b"] < rows["c"]
        assert rows["weight"] == rows["b"]  # just above its user

    def test_boxes_do_not_overlap_and_are_inside(self) -> None:
        wide = [BlockNode("x", "input", "", ())]
        wide += [BlockNode(f"n{i}", "aten.neg.default", "", ("x",)) for i in range(7)]
        for nodes in (DIAMOND, wide):
            drawing = draw(nodes, [(node.name, "bf16[1024, 1024]") for node in nodes])
            for box in drawing.boxes:
                assert box.width / 2 <= box.x <= drawing.width - box.width / 2
                assert 0 <= box.y <= drawing.height - BOX_HEIGHT
            for one, other in itertools.combinations(drawing.boxes, 2):
                assert one.y != other.y or abs(one.x - other.x) >= (one.width + other.width) / 2

    def test_an_edge_for_each_input(self) -> None:
        drawing = draw(DIAMOND, [(node.name, node.shape) for node in DIAMOND])
        assert len(drawing.edges) == 6
        boxes = {(box.x, box.y) for box in drawing.boxes}
        for edge in drawing.edges:
            assert edge[-1] in boxes
            assert edge[0][1] < edge[-1][1]

    def test_nothing_to_draw(self) -> None:
        assert draw([], []).boxes == ()
