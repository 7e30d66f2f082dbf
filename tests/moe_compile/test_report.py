import json
import logging
import re
import threading

import pytest

from moe_compile import report
from moe_compile.report import CompileReport, LayerReport, collecting, merge, record, reports, with_note
from moe_compile.selection import Rejection
from moe_compile.spec import ExpertSpec, GateFunction

SPEC = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, gate=GateFunction(limit=7.0))
DONE = LayerReport(
    "model.layers.0.mlp.experts",
    "grouped_mm",
    SPEC,
    "triton",
    rejected=(Rejection("aiter", "aiter is not installed", "build it from source"),),
)
LEFT = LayerReport(
    "model.layers.1.mlp.experts",
    "grouped_mm",
    reason="the weights are not graph inputs",
    node="mul_7",
    location="model.py:12",
)


def test_counts() -> None:
    both = CompileReport((DONE, LEFT, DONE))
    assert (both.rewritten, both.skipped) == (2, 1)
    assert (CompileReport().rewritten, CompileReport().skipped) == (0, 0)


@pytest.mark.parametrize(
    ("made", "summary"),
    [
        (CompileReport(), "no expert blocks found"),
        (CompileReport((DONE, DONE)), "2/2 expert blocks -> triton"),
        (CompileReport((DONE, LEFT)), "1/2 expert blocks -> triton"),
        (CompileReport((LEFT,)), "0/1 expert blocks"),
        (
            CompileReport((DONE, LayerReport("x", "grouped_mm", SPEC, "reference"))),
            "2/2 expert blocks -> reference, triton",
        ),
        (
            CompileReport(from_cache=1),
            "graph taken from the compile cache, compiled with these options and this version",
        ),
    ],
)
def test_summary(made: CompileReport, summary: str) -> None:
    assert made.summary() == summary


def test_json_round_trip() -> None:
    made = CompileReport((DONE, LEFT), target="sm_90", seconds=0.25, notes=("slow",))
    data = json.loads(made.to_json())
    assert data == made.to_dict()
    assert (data["rewritten"], data["skipped"], data["target"], data["graphs"]) == (1, 1, "sm_90", 1)
    assert (data["from_cache"], data["seconds"], data["notes"]) == (0, 0.25, ["slow"])
    done, left = data["layers"]
    assert done["moe_backend"] == "triton"
    assert done["spec"]["gate"]["limit"] == 7.0
    assert done["rejected"] == [
        {"backend": "aiter", "reason": "aiter is not installed", "remedy": "build it from source"}
    ]
    assert left["spec"] is None
    assert left["moe_backend"] is None
    assert left["reason"] == "the weights are not graph inputs"
    assert (left["node"], left["location"]) == ("mul_7", "model.py:12")


class TestText:
    def test_the_table_and_every_reason(self) -> None:
        text = str(CompileReport((DONE, LEFT), target="sm_90", notes=("the first run packs the weights",)))
        lines = text.splitlines()
        assert lines[0].strip() == "moe_rocm: 1/2 expert blocks -> triton on sm_90"
        row = next(line for line in lines if "layers.0" in line)
        assert re.findall(r"[^\s│][^│]*[^\s│]", row) == [
            "model.layers.0.mlp.experts",
            "grouped_mm",
            "H64 I96 E8 k2",
            "silu(limit=7)",
            "triton",
        ]
        assert "left alone" in next(line for line in lines if "│ model.layers.1" in line)
        assert (
            "  model.layers.1.mlp.experts: left alone: the weights are not graph inputs [graph node mul_7]\n"
            "    at model.py:12"
        ) in text
        assert "backends passed over:\n  aiter: aiter is not installed (build it from source)" in text
        assert lines[-1] == "note: the first run packs the weights"

    def test_no_layers(self) -> None:
        assert str(CompileReport(target="cpu")) == "moe_rocm: no expert blocks found on cpu"

    def test_up_first_is_said(self) -> None:
        spec = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, up_first=True)
        assert "silu, up rows first" in str(CompileReport((LayerReport("x", "grouped_mm", spec, "triton"),)))

    def test_a_passed_over_backend_is_listed_once_for_all_layers(self) -> None:
        assert str(CompileReport((DONE, DONE))).count("aiter is not installed") == 1

    def test_brackets_in_names_and_reasons_are_not_markup(self) -> None:
        note = "[dim]n[/dim] :smile:"
        layer = LayerReport("layers.[bold]0[/bold]", "f[red]", SPEC, None, reason="L['x'] is [link=y]odd[/link]")
        text = str(CompileReport((layer,), target="[blue]cpu", notes=(note,)))
        for part in ("layers.[bold]0[/bold]", "f[red]", "L['x'] is [link=y]odd[/link]", "[blue]cpu", note):
            assert part in text

    def test_long_reasons_are_wrapped_not_cut(self) -> None:
        reason = " ".join(f"word{i}" for i in range(100))
        text = " ".join(str(CompileReport((LayerReport("x", "f", SPEC, None, reason=reason),))).split())
        assert reason in text


class TestMerge:
    def test_nothing(self) -> None:
        assert merge([]) == CompileReport(graphs=0)
        assert merge([]).summary() == "no expert blocks found"

    def test_graphs_are_counted_and_equal_blocks_listed_once(self) -> None:
        prefill = CompileReport((DONE, LEFT), target="sm_90", seconds=0.25, notes=("a",))
        decode = CompileReport((DONE,), target="sm_90", seconds=0.5, notes=("a", "b"))
        merged = merge([prefill, decode])
        assert merged.layers == (DONE, LEFT)
        assert (merged.graphs, merged.seconds, merged.target, merged.notes) == (2, 0.75, "sm_90", ("a", "b"))

    def test_a_block_with_another_outcome_is_listed_again(self) -> None:
        other = LayerReport(DONE.name, DONE.form, reason="T is not known")
        assert merge([CompileReport((DONE,)), CompileReport((other,))]).layers == (DONE, other)

    def test_graphs_from_the_cache(self) -> None:
        cached = CompileReport(from_cache=1)
        assert merge([cached, cached]).summary().startswith("graph taken from the compile cache")
        mixed = merge([cached, CompileReport((DONE,))])
        assert (mixed.graphs, mixed.from_cache, mixed.summary()) == (2, 1, "1/1 expert blocks -> triton")


class TestRecord:
    def test_reports_are_kept_in_order_and_given_out_as_a_copy(self) -> None:
        first, second = CompileReport((DONE,)), CompileReport((LEFT,))
        record(first)
        record(second)
        assert reports() == [first, second]
        reports().clear()
        assert reports() == [first, second]
        report.clear()
        assert reports() == []

    def test_collecting_sees_only_what_is_recorded_inside(self) -> None:
        record(CompileReport())
        with collecting() as outer:
            record(CompileReport((DONE,)))
            with collecting() as inner:
                record(CompileReport((LEFT,)))
        record(CompileReport())
        assert outer == [CompileReport((DONE,)), CompileReport((LEFT,))]
        assert inner == [CompileReport((LEFT,))]
        assert len(reports()) == 4

    def test_two_equal_collectors_are_told_apart(self) -> None:
        """Both lists are equal (empty) when the inner one closes; the outer one must stay open."""
        with collecting() as outer:
            with collecting():
                pass
            record(CompileReport((DONE,)))
        assert outer == [CompileReport((DONE,))]

    def test_a_collector_closes_after_an_error(self) -> None:
        with pytest.raises(KeyError), collecting() as found:
            raise KeyError
        record(CompileReport())
        assert found == []

    def test_one_info_line_per_report_and_one_debug_line_per_block_left_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "moe_compile")
        left = "model.layers.1.mlp.experts left alone: the weights are not graph inputs"
        line = f"moe_rocm: 1/2 expert blocks -> triton; {left}"
        record(CompileReport((DONE, LEFT)))
        assert caplog.messages == [line]
        caplog.clear()
        caplog.set_level(logging.DEBUG, "moe_compile")
        record(CompileReport((DONE, LEFT, LEFT)))
        assert caplog.messages[0] == line.replace("1/2", "1/3") + " (and 1 more)"
        assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG", "DEBUG"]

    def test_threads(self) -> None:
        def record_many() -> None:
            for _ in range(100):
                record(CompileReport())

        threads = [threading.Thread(target=record_many) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(reports()) == 800


def test_with_note_leaves_the_original_alone() -> None:
    made = CompileReport(notes=("a",))
    assert with_note(made, "b").notes == ("a", "b")
    assert made.notes == ("a",)
