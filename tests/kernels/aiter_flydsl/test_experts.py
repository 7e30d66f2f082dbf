"""The operator `moe_compile::aiter_experts` against a stand-in that enforces AITER's contract (no AITER, no GPU)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import aiter_stand_in
import pytest
import torch
from aiter_blocks import M3, Block, E, H, K, operator, relative
from torch import Tensor

from moe_compile import packed_weights
from moe_compile.errors import GraphCaptureError
from moe_compile.kernels import ops
from moe_compile.kernels.aiter_flydsl.experts import bucket
from moe_compile.kernels.mxfp8 import quantize
from moe_compile.spec import GateFunction


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    packed_weights.clear()
    yield
    packed_weights.clear()


@pytest.fixture
def aiter(tmp_path: Path) -> Iterator[None]:
    with aiter_stand_in.importable(tmp_path, "HEAD"):
        yield


@pytest.mark.parametrize("release", ["v0.1.16.post2", "v0.1.18", "v0.1.19", "v0.1.20.post1", "HEAD"])
def test_every_release_with_the_mxfp8_route(tmp_path: Path, release: str) -> None:
    with aiter_stand_in.importable(tmp_path, release):
        assert Block().error() <= 2e-3
        assert len(aiter_stand_in.calls) == 1


@pytest.mark.usefixtures("aiter")
class TestValues:
    @pytest.mark.parametrize("tokens", [1, 2, 17, 64])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_tokens(self, tokens: int, dtype: torch.dtype) -> None:
        block = Block(tokens, dtype)
        out = block.run()
        assert (out.dtype, out.shape, out.stride()) == (dtype, (tokens, H), (H, 1))
        assert relative(out, block.expected()) <= 2e-3

    def test_no_tokens_never_reach_aiter(self) -> None:
        out = Block(0).run()
        assert (out.shape, out.dtype) == ((0, H), torch.bfloat16)
        assert aiter_stand_in.calls == []

    @pytest.mark.parametrize(
        "gate",
        [
            M3,
            GateFunction(alpha=1.702, limit=2.5, up_offset=1.0),
            GateFunction(alpha=1.702, up_offset=1.0),
            GateFunction(),
            GateFunction(limit=7.0),
        ],
        ids=str,
    )
    def test_limits_mean_what_they_say(self, gate: GateFunction) -> None:
        """None, 2.5 and 7 are three functions, of SwiGLU and of silu, on inputs that reach them all."""
        block = Block(gate=gate)
        assert block.error() <= 2e-3
        for other in (None, 2.5, 7.0):
            if other != gate.limit:
                changed = Block(gate=GateFunction(alpha=gate.alpha, limit=other, up_offset=gate.up_offset))
                assert relative(changed.expected(), block.expected()) > 0.02

    def test_padded_scale_columns(self) -> None:
        assert Block(intermediate=384).error() <= 2e-3

    def test_every_layout_of_the_weights(self) -> None:
        block = Block()
        wanted = block.run()
        gate, up = block.gate_up.chunk(2, 1)
        interleaved = torch.stack([gate, up], 2).flatten(1, 2)
        for gate_up, keywords in (
            (interleaved, {"gate_up_layout": "interleaved"}),
            (torch.cat([up, gate], 1), {"up_first": True}),
        ):
            block.gate_up = gate_up
            assert torch.equal(block.run(**keywords), wanted)
        block.gate_up, block.down = torch.cat([gate, up], 1).mT.contiguous(), block.down.mT.contiguous()
        assert torch.equal(block.run(transposed=True), wanted)

    @pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
    def test_fp8_checkpoint_weights_are_reordered_and_not_quantised_again(self, scale_dtype: torch.dtype) -> None:
        block = Block()
        from_floats = block.run()
        block.gate_up, gate_up_scale = quantize(block.gate_up)
        block.down, down_scale = quantize(block.down)
        block.scales = {"gate_up_scale": gate_up_scale.view(scale_dtype), "down_scale": down_scale.view(scale_dtype)}
        assert torch.equal(block.run(), from_floats)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_routing_weights_of_other_dtypes(self, dtype: torch.dtype) -> None:
        block = Block()
        block.weights = block.weights.to(dtype)
        assert block.error() <= 2e-3

    def test_strided_hidden_states(self) -> None:
        block = Block()
        wanted = block.run()
        block.hidden = block.hidden.t().contiguous().t()
        assert torch.equal(block.run(), wanted)

    def test_a_row_of_nan_stays_in_its_row(self) -> None:
        block = Block()
        wanted = block.run()
        block.hidden[3] = torch.nan
        out = block.run()
        assert out[3].isnan().all()
        assert torch.equal(out[torch.arange(17) != 3], wanted[torch.arange(17) != 3])


@pytest.mark.usefixtures("aiter")
class TestRouting:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_ids_that_name_no_expert_contribute_zero(self, dtype: torch.dtype) -> None:
        block = Block()
        ids = block.ids.to(dtype)
        ids[0, 0], ids[1, 1], ids[2, 2] = -1, E, torch.iinfo(dtype).max
        ids[3], ids[4] = -1, E
        out = block.run(ids)
        assert relative(out, block.expected(ids)) <= 2e-3
        assert (out[3:5] == 0).all()

    def test_repeated_ids_add_their_weights(self) -> None:
        block = Block()
        ids = block.ids.clone()
        ids[0] = 2
        ids[1, 2] = ids[1, 0]
        assert block.error(ids) <= 2e-3

    def test_expert_maps(self) -> None:
        """Also one whose local ids are in another order, which no mask over the global experts could say."""
        for entries in ([-1, 0, 1, -1, 2, 3, 4, 5], [5, 4, -1, 3, 2, -1, 1, 0], [-1, -1, -1, -1]):
            block = Block()
            ids = torch.stack([torch.randperm(len(entries) + 1)[:K] for _ in range(17)])
            assert block.run(ids, expert_map=torch.tensor(entries)).isfinite().all()
            wanted = block.expected(ids, torch.tensor(entries))
            got = block.run(ids, expert_map=torch.tensor(entries, dtype=torch.int32))
            assert (got.double() - wanted).norm() <= 2e-3 * wanted.norm()

    @pytest.mark.parametrize("ranks", [1, 2, 3, 6])
    def test_the_sum_over_ranks_is_the_whole(self, ranks: int) -> None:
        block = Block()
        wanted, total = block.expected(), torch.zeros(17, H, dtype=torch.float64)
        gate_up, down = block.gate_up, block.down
        for rank in range(ranks):
            mine = range(rank * E // ranks, (rank + 1) * E // ranks)
            block.gate_up, block.down = gate_up[mine.start : mine.stop], down[mine.start : mine.stop]
            entries = [i - mine.start if i in mine else -1 for i in range(E)]
            total += block.run(expert_map=torch.tensor(entries)).double()
        assert relative(total, wanted) <= 4e-3

    def test_no_id_is_read_on_the_host(self) -> None:
        """On fake tensors, which have no values, routing works as well."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from moe_compile.kernels.aiter_flydsl.routing import routing
        from moe_compile.kernels.expert_parallel import ExpertMap, mask_of

        mask = mask_of(ExpertMap.identity(E))
        with FakeTensorMode(allow_non_fake_inputs=True):
            ids, weights = routing(torch.zeros(5, K, dtype=torch.int64), torch.zeros(5, K), torch.zeros(9).int(), mask)
        assert (ids.shape, ids.dtype) == ((5, K + 1), torch.int32)
        assert (weights.shape, weights.dtype) == ((5, K + 1), torch.float32)


@pytest.mark.usefixtures("aiter")
class TestPacking:
    def test_one_pack_for_all_graphs_that_dies_with_the_weights(self) -> None:
        block = Block()
        block.run()
        other = Block(2)
        other.gate_up, other.down = block.gate_up, block.down
        other.run()
        assert packed_weights.statistics().entries == 1
        first, second = aiter_stand_in.calls
        assert first["w1"].data_ptr() == second["w1"].data_ptr()
        first.clear()
        second.clear()
        aiter_stand_in.calls.clear()
        del block, other
        gc.collect()
        assert packed_weights.statistics().entries == 0

    def test_changed_weights_are_packed_again_at_the_same_addresses(self) -> None:
        block = Block()
        before = block.run()
        block.down.mul_(2)
        assert torch.equal(block.run(), 2 * before)
        block.gate_up[1].zero_()
        assert block.error() <= 2e-3
        names = ("w1", "w2", "w1_scale", "w2_scale", "expert_mask")
        first, *rest = [[call[name].data_ptr() for name in names] for call in aiter_stand_in.calls]
        assert rest == [first] * 2
        assert packed_weights.statistics().entries == 1

    def test_the_canonical_pack_is_another(self) -> None:
        block = Block()
        block.run()
        ops.operator("reference")(block.hidden, block.ids, block.weights, block.gate_up, block.down)
        assert packed_weights.statistics().entries == 2

    def test_the_tag_survives_the_operator_under_torch_compile(self) -> None:
        block = Block()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(hidden: Tensor) -> Tensor:
            out: Tensor = operator(hidden, block.ids, block.weights, gate_up, down, **ops.attributes(block.spec))
            return out

        gate_up, down = torch.nn.Parameter(block.gate_up), torch.nn.Parameter(block.down)
        with torch.no_grad():
            assert relative(run(block.hidden), block.expected()) <= 2e-3


@pytest.mark.usefixtures("aiter")
class TestCapture:
    @pytest.fixture(autouse=True)
    def pretend_to_be_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from moe_compile.kernels.aiter_flydsl import experts

        self.capturing = False
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        refuse = experts._refuse_capture

        class OnGpu:
            device = torch.device("cuda")

        monkeypatch.setattr(experts, "_refuse_capture", lambda hidden, tokens: refuse(OnGpu(), tokens))

    def test_a_batch_that_was_not_warmed_up_is_refused_and_others_run(self) -> None:
        block, larger = Block(17), Block(33)
        larger.gate_up, larger.down = block.gate_up, block.down
        block.run()
        self.capturing = True
        block.run()  # 17 and 32 tokens are one bucket
        with pytest.raises(GraphCaptureError, match="Call the model once with 33 tokens before the capture"):
            larger.run()
        with pytest.raises(GraphCaptureError):  # the same tokens, but another routing kernel
            block.run(expert_map=torch.arange(E))
        self.capturing = False
        larger.run()
        self.capturing = True
        assert larger.error() <= 2e-3

    def test_buckets(self) -> None:
        assert len({bucket(t) for t in (17, 18, 31, 32)}) == 1
        assert len({bucket(t) for t in (1, 2, 3, 5, 9, 17, 2047, 2048, 2049, 32768, 131072)}) == 11
        assert bucket(1) == (1, 0)
        assert bucket(40000) == bucket(100000)
