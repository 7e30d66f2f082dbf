"""The cache of packed weights, with a packed value that is easy to check: the sum of its sources."""

from __future__ import annotations

import gc
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from moe_compile import packed_weights
from moe_compile.errors import PackedWeightsError
from moe_compile.packed_weights import Packing, Sources, Watch, lookup, refresh, statistics


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    packed_weights.clear()
    yield
    packed_weights.clear()


@dataclass(frozen=True)
class Packed:
    total: Tensor

    @property
    def nbytes(self) -> int:
        return self.total.nbytes


class Counting:
    """A packing that counts its work."""

    def __init__(self, layout: str = "sum") -> None:
        self.builds = 0
        self.rebuilds = 0
        self.packing = Packing(layout, self.build, self.rebuild)

    def build(self, sources: Sources) -> Packed:
        self.builds += 1
        return Packed(self.total(sources))

    def rebuild(self, packed: Packed, sources: Sources) -> None:
        self.rebuilds += 1
        packed.total.copy_(self.total(sources))

    @staticmethod
    def total(sources: Sources) -> Tensor:
        return torch.stack([source.detach() for source in sources if source is not None]).sum(0)

    def __call__(self, *sources: Tensor | None) -> Tensor:
        return lookup(sources, self.packing).total


def parameters(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((4, 4), float(value))) for value in values]


def all_equal(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_packed_once_and_found_again() -> None:
    pack = Counting()
    a, b = parameters(1, 2)
    first = pack(a, b, None)
    assert all_equal(first, 3)
    assert pack(a, b, None) is first
    assert (pack.builds, pack.rebuilds) == (1, 0)
    assert statistics() == packed_weights.Statistics(1, 64)


def test_views_and_detached_aliases_share() -> None:
    pack = Counting()
    a, b = parameters(1, 2)
    assert pack(a, b) is pack(a.detach(), b.view(4, 4))
    assert pack.builds == 1


@pytest.mark.parametrize("other", ["transposed", "half", "slice", "layout", "dtype"])
def test_whatever_reads_the_memory_differently_is_another_pack(other: str) -> None:
    pack = Counting()
    (a,) = parameters(1)
    first = pack(a)
    if other == "layout":
        second = Counting("another")(a)
    else:
        views = {"transposed": a.t(), "half": a[:2], "slice": a[1:3], "dtype": a.detach().view(torch.int32)}
        second = pack(views[other])
    assert second is not first
    assert statistics().entries == 2


@pytest.mark.parametrize("change", ["copy_", "load_state_dict", "optimizer", "add_", "foreach", "inference_mode"])
def test_in_place_changes_are_followed_at_the_same_address(change: str) -> None:
    pack = Counting()
    module = nn.ParameterDict({"a": nn.Parameter(torch.ones(4, 4)), "b": nn.Parameter(torch.ones(4, 4))})
    before = pack(module["a"], module["b"])
    address = before.data_ptr()
    three = torch.full((4, 4), 3.0)
    if change == "copy_":
        with torch.no_grad():
            module["a"].copy_(three)
    elif change == "load_state_dict":
        module.load_state_dict({"a": three, "b": torch.ones(4, 4)})
    elif change == "optimizer":
        module["a"].grad = torch.full((4, 4), -2.0)
        torch.optim.SGD(module.values(), lr=1.0).step()
    elif change == "add_":
        with torch.no_grad():
            module["a"].add_(2)
    elif change == "foreach":
        with torch.no_grad():
            torch._foreach_add_([module["a"]], 2.0)
    else:
        with torch.inference_mode():
            module["a"].copy_(three)
    after = pack(module["a"], module["b"])
    assert after is before
    assert after.data_ptr() == address
    assert all_equal(after, 4)
    assert (pack.builds, pack.rebuilds) == (1, 1)
    assert pack(module["a"], module["b"]) is before
    assert pack.rebuilds == 1


def test_assigned_weights_are_new_and_the_old_pack_goes() -> None:
    pack = Counting()
    module = nn.ParameterDict({"a": nn.Parameter(torch.ones(4, 4)), "b": nn.Parameter(torch.ones(4, 4))})
    assert all_equal(pack(*module.values()), 2)
    module.load_state_dict({"a": torch.full((4, 4), 5.0), "b": torch.ones(4, 4)}, assign=True)
    gc.collect()
    assert statistics().entries == 0
    assert all_equal(pack(module["a"], module["b"]), 6)
    assert pack.builds == 2


def test_a_pack_dies_with_either_source() -> None:
    for dead in (0, 1):
        pack = Counting()
        sources = parameters(1, 2)
        value = weakref.ref(pack(*sources))
        del sources[dead]
        gc.collect()
        assert value() is None, "the packed memory is still held"
        assert statistics() == packed_weights.Statistics(0, 0)


def test_a_pack_does_not_keep_its_sources_alive() -> None:
    pack = Counting()
    sources = parameters(1, 2)
    references = [weakref.ref(source.untyped_storage()) for source in sources]
    pack(*sources)
    sources.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_view_keeps_the_pack() -> None:
    pack = Counting()
    (a,) = parameters(1)
    pack(a)
    view = a.detach()[1:]
    del a
    gc.collect()
    assert statistics().entries == 1
    del view
    gc.collect()
    assert statistics().entries == 0


def test_reused_addresses_never_hit() -> None:
    """New parameters over the very memory of dead ones, which an allocator does when it likes."""
    pack = Counting()
    first, second = parameters(0, 1)
    memory = [bytearray(t.numel() * t.element_size()) for t in (first, second)]
    addresses = set()
    for i in range(20):
        for buffer, source in zip(memory, parameters(i, 1), strict=True):
            torch.frombuffer(buffer, dtype=source.dtype).copy_(source.detach().flatten())
        a, b = (
            torch.frombuffer(buffer, dtype=like.dtype).view(like.shape)
            for buffer, like in zip(memory, (first, second), strict=True)
        )
        addresses.add((a.data_ptr(), b.data_ptr()))
        assert all_equal(pack(a, b), i + 1)
        del a, b
    assert len(addresses) == 1
    assert pack.builds == 20
    assert statistics().entries == 0


def test_replaced_data_is_a_new_pack() -> None:
    pack = Counting()
    a, b = parameters(1, 2)
    pack(a, b)
    a.data = torch.full((4, 4), 10.0)
    assert all_equal(pack(a, b), 12)
    assert statistics().entries == 1


def test_edits_through_data_need_refresh() -> None:
    pack = Counting()
    a, b = parameters(1, 2)
    address = pack(a, b).data_ptr()
    a.data.fill_(5)
    assert all_equal(pack(a, b), 3), "a version counter saw .data: refresh is not needed any more"
    assert refresh([a, b]) == 1
    assert all_equal(pack(a, b), 7)
    assert pack(a, b).data_ptr() == address


def test_refresh_of_part_of_a_pack_names_the_rest_and_rebuilds_nothing() -> None:
    pack = Counting()
    a, b = parameters(1, 2)
    c = nn.Parameter(torch.ones(2, 2))
    pack(c)
    pack(a, b)
    with pytest.raises(PackedWeightsError, match=r"weights of shape \(4, 4\) are packed together .* whole model"):
        refresh([c, a])
    assert pack.rebuilds == 0


def test_refresh_passes_over_what_is_not_packed() -> None:
    pack = Counting()
    (a,) = parameters(1)
    pack(a)
    sparse = torch.eye(3).to_sparse()
    assert refresh([sparse, torch.empty(2, device="meta"), torch.ones(3)]) == 0
    assert refresh([a, sparse]) == 1


def test_inference_tensors_are_packed_with_a_warning_and_refreshed(caplog: pytest.LogCaptureFixture) -> None:
    pack = Counting()
    with torch.inference_mode():
        a = torch.ones(4, 4)
        assert all_equal(pack(a), 1)
    assert "moe_compile.refresh" in caplog.text
    assert all_equal(pack(a), 1)
    with torch.inference_mode():
        a.fill_(2)
    assert refresh([a]) == 1
    assert all_equal(pack(a), 2)
    assert (pack.builds, pack.rebuilds) == (1, 1)


def test_a_pack_made_in_inference_mode_can_be_rebuilt_outside() -> None:
    pack = Counting()
    (a,) = parameters(1)
    with torch.inference_mode():
        assert not pack(a).is_inference()
    with torch.no_grad():
        a.add_(1)
    assert all_equal(pack(a), 2)


def test_a_failed_build_leaves_nothing() -> None:
    pack = Counting()
    (a,) = parameters(1)

    def fail(sources: Sources) -> Packed:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lookup((a,), Packing("sum", fail, pack.rebuild))
    assert statistics().entries == 0
    assert all_equal(pack(a), 1)


def test_a_failed_rebuild_is_tried_again() -> None:
    pack = Counting()
    (a,) = parameters(1)
    pack(a)
    with torch.no_grad():
        a.add_(1)
    entry = next(iter(packed_weights._entries.values()))
    working = entry.packing

    def fail(packed: Packed, sources: Sources) -> None:
        raise ValueError("no")

    entry.packing = Packing("sum", pack.build, fail)
    with pytest.raises(ValueError, match="no"):
        pack(a)
    entry.packing = working
    assert all_equal(pack(a), 2)


def test_threads_build_once() -> None:
    (a,) = parameters(1)
    pack = Counting()

    def slow(sources: Sources) -> Packed:
        time.sleep(0.05)
        return pack.build(sources)

    packing = Packing("sum", slow, pack.rebuild)
    found: list[Tensor] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        found.append(lookup((a,), packing).total)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pack.builds == 1
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_a_source_that_dies_while_another_pack_is_built() -> None:
    pack = Counting()
    doomed, kept = parameters(1, 2)
    pack(doomed)
    box = [doomed]
    del doomed

    def build(sources: Sources) -> Packed:
        box.clear()  # runs the finalizer in this thread, which holds the lock
        return pack.build(sources)

    lookup((kept,), Packing("sum", build, pack.rebuild))
    assert statistics().entries == 1


def test_a_finalizer_never_waits_for_the_thread_that_builds() -> None:
    """On a GPU packs are built in a helper thread; garbage collected there must not wait for the lock's owner."""
    pack = Counting()
    doomed, kept = parameters(1, 2)
    pack(doomed)
    box = [doomed]
    del doomed
    ended = []

    def build(sources: Sources) -> Packed:
        helper = threading.Thread(target=box.clear, daemon=True)
        helper.start()
        helper.join(timeout=10)
        ended.append(not helper.is_alive())
        return pack.build(sources)

    lookup((kept,), Packing("sum", build, pack.rebuild))
    assert ended == [True]
    assert statistics().entries == 1


class TestWatch:
    """A compiled graph whose replay does not look anything up, as a CUDA graph's."""

    @pytest.fixture
    def pack(self) -> Counting:
        return Counting()

    class Replay:
        """Looks the pack up on the first call, and reads the same memory ever after."""

        def __init__(self, pack: Counting) -> None:
            self.pack = pack
            self.memory: Tensor | None = None

        def __call__(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            if self.memory is None:
                self.memory = self.pack(a, b, None)
            return x + self.memory

    def test_rebuilds_before_the_replay(self, pack: Counting) -> None:
        watch, replay, (a, b) = Watch(), self.Replay(pack), parameters(1, 2)
        x = torch.zeros(4, 4)
        assert all_equal(watch.run(replay, (x, a, b)), 3)
        with torch.no_grad():
            b.add_(10)
        assert all_equal(watch.run(replay, (x, a, b)), 13)
        assert all_equal(watch.run(replay, (x, a, b)), 13)
        assert (pack.builds, pack.rebuilds) == (1, 1)

    def test_a_second_graph_shares_and_follows(self, pack: Counting) -> None:
        first, second, (a, b) = self.Replay(pack), self.Replay(pack), parameters(1, 2)
        watches = Watch(), Watch()
        x = torch.zeros(4, 4)
        for watch, replay in zip(watches, (first, second), strict=True):
            watch.run(replay, (x, a, b))
        with torch.no_grad():
            a.zero_()
        for watch, replay in zip(watches, (first, second), strict=True):
            assert all_equal(watch.run(replay, (x, a, b)), 2)
        assert (pack.builds, pack.rebuilds) == (1, 1)

    def test_new_weights_are_packed_before_the_run(self, pack: Counting) -> None:
        """A CUDA graph is recorded again for new weights, with no eager run before: too late to pack."""
        watch, (a, b) = Watch(), parameters(1, 2)
        x = torch.zeros(4, 4)
        watch.run(self.Replay(pack), (x, a, b))
        c, d = parameters(3, 4)
        builds_at_call = []

        def record(x: Tensor, c: Tensor, d: Tensor) -> Tensor:
            builds_at_call.append(pack.builds)
            return x + pack(c, d, None)

        assert all_equal(watch.run(record, (x, c, d)), 7)
        assert builds_at_call == [2]

    def test_two_sets_of_weights_behind_one_graph(self, pack: Counting) -> None:
        """Regional compilation: every layer of a model runs the same compiled graph."""
        watch, layers = Watch(), [parameters(1, 2), parameters(3, 4)]
        x = torch.zeros(4, 4)
        replays = [self.Replay(pack), self.Replay(pack)]
        for replay, layer in zip(replays, layers, strict=True):
            watch.run(replay, (x, *layer))
        with torch.no_grad():
            layers[0][0].add_(100)
        results = [watch.run(replay, (x, *layer)) for replay, layer in zip(replays, layers, strict=True)]
        assert all_equal(results[0], 103)
        assert all_equal(results[1], 7)

    def test_weights_at_the_address_of_dead_ones(self, pack: Counting) -> None:
        watch, memory = Watch(), bytearray(4)
        x = torch.zeros(1)

        def run(x: Tensor, a: Tensor) -> Tensor:
            return x + pack(a)

        for i in range(4):
            a = torch.frombuffer(memory, dtype=torch.float32)
            address = a.data_ptr()
            memory[:] = struct.pack("f", i)
            for _ in range(2):
                assert all_equal(watch.run(run, (x, a)), i)
            del a
            assert torch.frombuffer(memory, dtype=torch.float32).data_ptr() == address
        assert pack.builds == 4

    def test_holds_no_pack(self, pack: Counting) -> None:
        watch, (a, b) = Watch(), parameters(1, 2)
        packs = []

        def run(a: Tensor, b: Tensor) -> None:
            packs.append(weakref.ref(pack(a, b)))

        for _ in range(2):
            watch.run(run, (a, b))
        del a, b
        gc.collect()
        assert packs[0]() is None

    def test_other_arguments_and_other_graphs_are_left_alone(self, pack: Counting) -> None:
        watch, (a, b) = Watch(), parameters(1, 2)
        pack(a, b)
        assert watch.run(lambda *args: len(args), (3, None, torch.eye(2).to_sparse(), a, b)) == 5
        with torch.no_grad():
            a.add_(1)
        watch.run(lambda *args: None, (3, None, torch.eye(2).to_sparse(), a, b))
        assert pack.rebuilds == 0, "this graph does not read the pack"
