"""One rank of an expert- or tensor-parallel run on CPUs: ``python parallel_ranks.py RANK WORLD_SIZE STORE``.

All checks of one world size share one process per rank, because importing torch and transformers takes seconds. Every
check fails by an exception, so by the exit code.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import tiny_hf_models as hf
import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import moe_compile
from moe_compile import packed_weights
from moe_compile.errors import RewriteRefused, UnsupportedExperts
from moe_compile.kernels.expert_parallel import ExpertMap

EXACT = 1e-5  # float32, summed over ranks in another order


def distribute(model: Any, kind: str, world: int, implementation: str = "grouped_mm", **rules: str) -> Any:
    """A copy of ``model`` under transformers' ``ep`` or ``tp`` plan; ``rules`` replace those of experts' weights."""
    model = copy.deepcopy(model)
    model.config._experts_implementation = implementation
    options: dict[str, Any] = {"tp_size": world}
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        options["ep_size"] = world if kind == "ep" else 1
    else:  # transformers 5.17
        options.update(tp_plan="auto", enable_expert_parallel=kind == "ep")
    if rules:
        changed = {f"model.layers.*.mlp.experts.{name}": style for name, style in rules.items()}
        options["tp_plan"] = model.tp_plan | changed
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(**options))
    model.config.distributed_config = config
    return type(model).maybe_distribute_model(model, config, mesh)


def compiled(model: Any, *inputs: torch.Tensor, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Logits for each input, and the report of the first graph."""
    torch._dynamo.reset()
    before = len(moe_compile.reports())
    function = torch.compile(model, backend="moe_rocm", options={"inductor": False, "strict": True, **options})
    logits = [function(ids).logits for ids in inputs]
    return logits, moe_compile.reports()[before]


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = EXACT) -> None:
    error = hf.relative_error(actual, expected)
    assert error < bound, error


def check_expert_parallel(family: str, rank: int, world: int) -> None:
    model = hf.build(family)
    rounded = hf.yardstick(model)
    prompt, token = hf.tokens(12), hf.tokens(1)  # one token of two experts: with four ranks, two have nothing to do
    parallel = distribute(model, "ep", world)
    close(parallel(prompt).logits, model(prompt).logits)
    (many, one), report = compiled(parallel, prompt, token)
    close(many, rounded(prompt).logits)
    close(one, rounded(token).logits)
    # Auto chooses on each rank, for the experts that are there, and says what and why.
    assert report.rewritten == len(report.layers) > 0, report
    for layer in report.layers:
        assert layer.moe_backend == "reference"
        assert layer.spec.num_experts == 8 // world
        rejected = {one.backend for one in layer.rejected}
        assert rejected == {"aiter", "flydsl", "triton_native", "triton"}, rejected
    assert any("needs gfx950" in one.reason for one in report.layers[0].rejected)
    # One packed copy of this rank's experts serves both graphs, and follows changes of the weights in place.
    assert packed_weights.statistics().entries == len(report.layers)
    assert moe_compile.refresh(parallel) == len(report.layers)


def check_tensor_parallel(rank: int, world: int) -> None:
    """Each rank has its part of gate and its part of up; 32-element blocks stay whole if I / ranks is a multiple."""
    ids = hf.tokens(12)
    model = hf.build("minimax_m3_vl", intermediate_size=32 * world)
    (logits,), report = compiled(distribute(model, "tp", world), ids)
    close(logits, hf.yardstick(model)(ids).logits)
    assert report.layers[0].spec.intermediate_size == 32
    # Other blocks: a cut through the middle of one gives two scales where there was one. With columns that are tiny
    # in one half, those survive in the parts and are lost in the whole.
    model = hf.build("minimax_m3_vl", intermediate_size=16 * world)
    down = model.model.layers[1].mlp.experts.down_proj
    down.view(*down.shape[:2], -1, 16)[:, :, ::2] *= 2.0**-18
    whole, exact = hf.yardstick(model), model(ids).logits
    parts = copy.deepcopy(model)
    experts, rounded = parts.model.layers[1].mlp.experts, hf.yardstick(model).model.layers[1].mlp.experts
    experts.gate_up_proj.copy_(rounded.gate_up_proj)
    for i in range(world):
        columns = slice(16 * i, 16 * i + 16)
        experts.down_proj[..., columns] = hf.dequantize(*hf.quantize(down[..., columns].contiguous()), dtype=down.dtype)
    assert not torch.equal(experts.down_proj, whole.model.layers[1].mlp.experts.down_proj)
    (logits,), _ = compiled(distribute(model, "tp", world), ids)
    close(logits, parts(ids).logits)
    close(logits, exact, 0.2)


def check_rows_cut_straight_through(world: int) -> None:
    model, ids = hf.build("minimax_m3_vl"), hf.tokens(3)
    naive = distribute(model, "tp", world, gate_up_proj="colwise")
    assert hf.relative_error(naive(ids).logits, model(ids).logits) > 0.01, "then it would not be wrong"
    with pytest.raises(RewriteRefused, match="(?s)all gate rows before all up rows.*packed_colwise"):
        compiled(naive, ids)
    with pytest.raises(UnsupportedExperts, match="all gate rows before all up rows.*packed_colwise"):
        moe_compile.accelerate(naive)


def check_uneven_experts(rank: int, world: int) -> None:
    """transformers refuses experts that do not divide by the ranks; the operators take any share, even none."""
    with pytest.raises(ValueError, match="Cannot evenly shard"):
        distribute(hf.build("minimax_m3_vl", num_local_experts=2 * world + 1), "ep", world)
    generator = torch.Generator().manual_seed(0)
    num_experts = world + 1
    up = torch.randn(num_experts, 64, 32, generator=generator)
    down = torch.randn(num_experts, 32, 32, generator=generator)
    x = torch.randn(5, 32, generator=generator)
    ids = torch.randint(0, num_experts, (5, 2), generator=generator)
    weights = torch.rand(5, 2, generator=generator)
    full = torch.ops.moe_compile.reference_experts(x, ids, weights, up, down)
    first = 0 if rank == 0 else 2 + rank - 1  # rank 0 has two experts, each other one
    last = 2 + rank
    here = ExpertMap.of_range(first, last, num_experts).tensor
    for backend in ("reference", "triton"):
        operator = getattr(torch.ops.moe_compile, f"{backend}_experts")
        part = operator(x, ids, weights, up[first:last].clone(), down[first:last].clone(), expert_map=here)
        dist.all_reduce(part)
        close(part, full)


def main(rank: int, world: int, store: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with torch.no_grad():
        check_expert_parallel("minimax_m3_vl", rank, world)
        check_uneven_experts(rank, world)
        check_rows_cut_straight_through(world)
        if world == 2:
            check_tensor_parallel(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
