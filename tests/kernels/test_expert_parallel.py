"""Expert maps and expert masks: two types, one conversion."""

from __future__ import annotations

import pytest
import torch

from moe_compile.errors import ExpertInputError
from moe_compile.kernels.expert_parallel import ExpertMap, ExpertMask, mask_of

MAPS = {
    "all here": [0, 1, 2, 3],
    "first half": [0, 1, -1, -1],
    "second half": [-1, -1, 0, 1],
    "every other": [-1, 0, -1, 1, -1, 2],
    "none here": [-1, -1, -1],
    "no experts at all": [],
}


@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_map_and_mask_say_the_same(case: str, dtype: torch.dtype) -> None:
    entries = MAPS[case]
    expert_map = ExpertMap(torch.tensor(entries, dtype=dtype))
    mask = mask_of(expert_map)
    assert mask.tensor.dtype == torch.int32
    assert mask.tensor.tolist() == [int(local >= 0) for local in entries] + [0]
    assert (mask.num_global, mask.fake_id) == (len(entries), len(entries))
    ids = torch.arange(len(entries) + 1, dtype=torch.int32)
    assert mask.local_ids(ids).tolist() == [*entries, -1]
    assert expert_map.local_ids(ids).tolist() == [*entries, -1]


def test_ids_that_name_no_expert() -> None:
    expert_map = ExpertMap(torch.tensor([2, -1, 0, 1]))
    ids = torch.tensor([[-1, 0, 4], [3, -(2**31), 2**31 - 1]], dtype=torch.int32)
    assert expert_map.local_ids(ids).tolist() == [[-1, 2, -1], [1, -1, -1]]
    assert expert_map.local_ids(ids).dtype == torch.int32


@pytest.mark.parametrize("entries", [[1, 0], [0, 0], [0, 2], [1, -1], [-1, 1, 0]])
def test_a_map_that_no_mask_can_say_is_refused(entries: list[int]) -> None:
    with pytest.raises(ExpertInputError, match="an expert mask needs 0 to"):
        mask_of(ExpertMap(torch.tensor(entries)))


def test_ranges() -> None:
    assert ExpertMap.of_range(2, 5, 6).tensor.tolist() == [-1, -1, 0, 1, 2, -1]
    assert ExpertMap.of_range(3, 3, 4).tensor.tolist() == [-1] * 4
    assert ExpertMap.identity(3).tensor.tolist() == ExpertMap.of_range(0, 3, 3).tensor.tolist() == [0, 1, 2]
    for first, last in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ExpertInputError, match="no range of 4 global experts"):
            ExpertMap.of_range(first, last, 4)


def test_one_is_not_taken_for_the_other() -> None:
    with pytest.raises(ExpertInputError, match=r"an expert map is \(E_global,\).*got torch.float32"):
        ExpertMap(torch.zeros(4))
    with pytest.raises(ExpertInputError, match=r"an expert mask is \(E_global \+ 1,\) int32, got torch.int64"):
        ExpertMask(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ExpertInputError, match="an expert mask"):
        ExpertMask(torch.zeros(0, dtype=torch.int32))
