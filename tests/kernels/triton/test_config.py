import itertools

import pytest

from moe_compile.kernels.triton.config import MAX_UNSORTED_SLOTS, choose_config
from moe_compile.kernels.triton.routing import max_blocks

ARCHS = ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dot", ["half", "fp32"])
def test_tiles_fit_the_format_and_the_slots(dot: str, arch: str) -> None:
    sizes = itertools.product([1, 2, 7, 16, 17, 300, 4096], [1, 4, 10], [1, 8, 256], [32, 100, 768, 6144], [31, 1536])
    for tokens, top_k, experts, hidden, intermediate in sizes:
        config = choose_config(tokens, top_k, experts, hidden, intermediate, dot, arch)
        assert (config.block_m is None) == (dot == "fp32" and tokens * top_k <= MAX_UNSORTED_SLOTS)
        assert config.block_m in (None, 16, 32, 64, 128)
        for part in filter(None, (config, config.tail)):
            for tiles, k in ((part.gate_up, hidden), (part.down, intermediate)):
                assert tiles.block_k % 32 == 0, "a tile holds whole blocks of the format"
                assert tiles.block_k & (tiles.block_k - 1) == 0
                assert tiles.split_k == 1 or config.tail is None, "tails write into the results of the blocks"
                assert tiles.split_k == 1 or k >= tiles.split_k * tiles.block_k, "every part has something to add"


def test_choices_for_known_models() -> None:
    def choice(tokens: int, *model: int, arch: str = "sm_90") -> str:
        return str(choose_config(tokens, model[3], model[2], model[0], model[1], "half", arch))

    m3_tp4, m2 = (6144, 768, 128, 4), (3072, 1536, 256, 8)
    assert choice(1, *m3_tp4) == "m16 gate_up n64k256w2s2x8 down n64k128w2s4"
    assert choice(1, *m2) == "m16 gate_up n64k128w2s4 down n64k128w2s4"
    assert choice(64, *m3_tp4) == "m16 gate_up n64k256w2s2 down n64k128w2s4"
    assert choice(512, *m3_tp4) == "m32 gate_up n64k256w2s2 down n64k128w2s4"
    assert choice(1024, *m3_tp4) == "m64 gate_up n128k128w4s3 down n128k128w4s3"
    assert choice(4096, *m3_tp4) == (
        "m128 gate_up n128k64w4s3 down n128k64w4s3 tail m32 gate_up n64k256w2s2 down n64k128w2s4"
    )
    assert choice(1024, *m3_tp4, arch="gfx950") == "m64 gate_up n128k64w8s2 down n128k64w8s2"


@pytest.mark.parametrize("block_m", [16, 128])
def test_max_blocks_is_reached_and_never_exceeded(block_m: int) -> None:
    for experts, slots in itertools.product([1, 2, 5], [1, 2, 17, 128, 129, 400]):
        bound = max_blocks(slots, experts, block_m)
        # The worst case: one slot on every expert but one, and the rest there.
        alone = min(experts, slots) - 1
        assert alone + -(-(slots - alone) // block_m) <= bound
        worst = max(
            sum(-(-count // block_m) for count in counts)
            for counts in _splits(slots, min(experts, 3), step=max(1, slots // 40))
        )
        assert worst <= bound
        assert bound <= slots


def _splits(total: int, parts: int, step: int) -> list[tuple[int, ...]]:
    """Ways to write ``total`` as ``parts`` counts, the first ones multiples of ``step`` plus one."""
    if parts == 1:
        return [(total,)]
    firsts = [0, *range(1, total + 1, step)]
    return [(first, *rest) for first in firsts for rest in _splits(total - first, parts - 1, step)]
