"""Each reason gets the remedy that belongs to it."""

import pytest

from moe_compile.passes.fusion_pass import GRADIENTS
from moe_compile.remedies import remedy
from moe_compile.report import LayerReport


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (GRADIENTS, "torch.no_grad()"),
        ("max_rewrites=1", "max_rewrites"),
        ("aten.native_dropout.default between the two projections is not a pointwise operator", "model.eval()"),
        ("aten.sort.default between the two projections is not a pointwise operator", "pointwise operators"),
        ("the group offsets are made by placeholder arg2_1, not by a cumulative sum of counts", "graph break"),
        (
            "the expert weight x: it is made by aten.add.Tensor, and only parameters and buffers are packed",
            "merge LoRA",
        ),
        ("the intermediate value mul is used elsewhere (by mean)", "remove the hook"),
        ("the gate function is none of the known ones (operators: tan; constants: )", "gate function"),
        ("the expert weight is torch.float8_e4m3fn without block scales", "block scales"),
        ("the up projection has dynamic sizes (s0, 3) besides its rows", "static"),
        ("the group sizes are made by aten.mul.Tensor, not by histc or bincount", "histc"),
        ("the expert weight is on cpu, the hidden states on cuda:0", "one device"),
        ("something that nobody has seen", "moe-compile dump"),
    ],
)
def test_the_remedy(reason: str, words: str) -> None:
    assert words in remedy(reason)
    assert LayerReport("x", "grouped_mm", reason=reason).remedy == remedy(reason)


def test_a_rewritten_block_needs_none() -> None:
    assert LayerReport("x", "grouped_mm", moe_backend="triton").remedy is None
