"""Each reason for leaving a block alone has a test that asks for its words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moe_compile.passes

# Guards that no graph that was captured from a model reaches.
UNREACHED = {
    "the up projection has dynamic sizes",
    "inside the gate function has dynamic sizes",
    "inside the gate function depends on the number of rows (",
    "inside the gate function is not a constant of static shape",
    "the gate function turns",
    "the routing weights are an integer function of the routing",
    "the projections compute more rows than there are slots",
    "no expert projection leads to the input of this one",
    ", which is not the up projection",
    "the expert weight has shape",
    "the expert ids are",
    ", not floating point",
    "the sum has shape",
    "the sum has several dynamic sizes:",
}


# Modules whose reasons are given where no graph is searched; their own tests ask for them.
OTHERS = {"gate_callable", "match_experts_op"}


def literals(node: ast.AST) -> list[str]:
    return [n.value.strip() for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def reasons() -> list[tuple[str, list[str]]]:
    assert moe_compile.passes.__file__ is not None
    found = []
    for path in sorted(Path(moe_compile.passes.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.stem in OTHERS:
                continue
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Unproven":
                pieces = [text for text in literals(node.args[0]) if len(text) > 6]
                found.append((f"{path.stem}:{max(pieces, key=len)[:60]}", pieces))
    return found


# So many characters of a reason are distinctive.
WORDS = 16

TESTED = [
    text
    for path in Path(__file__).parent.glob("test_*.py")
    if path != Path(__file__)
    for text in literals(ast.parse(path.read_text()))
    if len(text) > 8
]


@pytest.mark.parametrize(("name", "pieces"), reasons(), ids=[name for name, _ in reasons()])
def test_each_reason_has_a_test(name: str, pieces: list[str]) -> None:
    if any(piece in UNREACHED for piece in pieces):
        return
    windows = [piece[i : i + WORDS] for piece in pieces for i in range(max(1, len(piece) - WORDS + 1))]
    assert any(window in text for window in windows for text in TESTED), pieces
