"""Measure tile sizes on this GPU: ``python -m moe_compile.kernels.triton.tune --shape m3-tp4 --tokens 1,16,256``.

For each number of tokens: the time of each kernel of the block under `config.choose_config`, and then of each
projection under every candidate, best first. What wins belongs into the rules of config.py; nothing is tuned at run
time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_compile.kernels.packed import PackedExperts
from moe_compile.kernels.triton.config import Config, Tiles, choose_config
from moe_compile.kernels.triton.experts import plan
from moe_compile.kernels.triton.launch import Launch, execute
from moe_compile.spec import GateFunction
from moe_compile.target import Target

ROTATING_INPUTS = 8
REPLAYS = 8
PROJECTIONS = ("gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """One rank's expert block: H hidden, I intermediate, E experts, K experts a token."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gate: GateFunction = GateFunction()


_OAI = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("m3", 6144, 3072, 128, 4, _OAI),
        Shape("m3-tp4", 6144, 768, 128, 4, _OAI),
        Shape("m2", 3072, 1536, 256, 8),
    )
}


def find_shape(text: str) -> Shape:
    """A named shape, or ``HxIxExK``."""
    if text in SHAPES:
        return SHAPES[text]
    hidden, intermediate, experts, top_k = map(int, text.split("x"))
    return Shape(text, hidden, intermediate, experts, top_k)


def graph_seconds(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """Median seconds of one of ``calls``, captured one after the other in a single graph; each has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds: list[float] = []
    for replay in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            seconds.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(seconds)


def random_routing(shape: Shape, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids and weights; uniform, without repetition in a row."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    hidden = torch.randn(tokens, shape.hidden_size, device="cuda", generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(tokens, shape.num_experts, device="cuda", generator=generator).topk(shape.top_k, dim=-1)
    return hidden, ids, weights


def random_packed(shape: Shape, device: str = "cuda") -> PackedExperts:
    """Random bytes without NaN; rows of about norm 1."""
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if device == "meta":
            values = torch.empty((e, n, k), dtype=torch.uint8, device=device)
            return values.view(torch.float8_e4m3fn), torch.empty((e, n, k // 32), dtype=torch.uint8, device=device)
        values = torch.randint(32, 96, (e, n, k), dtype=torch.uint8, device=device)
        values += torch.randint(0, 2, (e, n, 1), dtype=torch.uint8, device=device) * 128
        scale = 124 - (k.bit_length() // 2)
        scales = torch.randint(scale - 1, scale + 2, (e, n, k // 32), dtype=torch.uint8, device=device)
        return values.view(torch.float8_e4m3fn), scales

    return PackedExperts(*weight(2 * i, h), *weight(h, i))


def candidates(block_m: int, tokens: int, k: int) -> Iterator[Tiles]:
    """Tiles worth trying."""
    if block_m <= 32:
        sizes = [(64, 256, 2, 2), (64, 256, 2, 3), (64, 128, 2, 3), (64, 128, 2, 4), (64, 128, 2, 6)]
    elif block_m == 64:
        sizes = [(128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 4, 3), (128, 128, 8, 3)]
    else:
        sizes = [(128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 2)]
    splits = [1, 2, 4, 8] if tokens == 1 else [1, 2] if tokens <= 4 else [1]
    for (n, block_k, warps, stages), split in itertools.product(sizes, splits):
        if k % (block_k * split) == 0:
            yield Tiles(n, block_k, warps, stages, split)


def block_configs(shape: Shape, tokens: int, arch: str, block_ms: Sequence[int]) -> Iterator[tuple[str, Config]]:
    """(projection, configuration with one projection changed); first the rule itself."""
    rule = choose_config(
        tokens, shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size, "half", arch
    )
    yield "rule", rule
    for block_m in block_ms or [rule.block_m or 16]:
        for name, k in zip(PROJECTIONS, (shape.hidden_size, shape.intermediate_size), strict=True):
            for tiles in candidates(block_m, tokens, k):
                changed = replace(rule, block_m=block_m)
                yield name, replace(changed, gate_up=tiles) if name == "gate_up" else replace(changed, down=tiles)


def _launches(shape: Shape, tokens: int, packed: PackedExperts, arch: str, config: Config, seed: int) -> list[Launch]:
    if packed.gate_up.device.type == "meta":
        hidden = torch.empty(tokens, shape.hidden_size, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens, shape.top_k, dtype=torch.int64, device="meta")
        weights = torch.empty(tokens, shape.top_k, dtype=torch.float32, device="meta")
    else:
        hidden, ids, weights = random_routing(shape, tokens, seed)
    launches: list[Launch] = plan(hidden, ids, weights, packed, shape.gate, arch, config=config)[1]
    return launches


def _is_gemm(launch: Launch) -> bool:
    return bool(launch.kernel.__name__ == "half_gemm_kernel")


def _compile(job: tuple[Shape, int, str, str, Config]) -> str | None:
    shape, tokens, arch, name, config = job
    launches = _launches(shape, tokens, random_packed(shape, "meta"), arch, config, 0)
    if name != "rule":
        launches = [[x for x in launches if _is_gemm(x)][PROJECTIONS.index(name)]]
    for launch in launches:
        values = [launch.arguments[parameter.name] for parameter in launch.kernel.params]
        types = [value.dtype if isinstance(value, torch.Tensor) else value for value in values]
        options: dict[str, Any] = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        if launch.overlap:
            options["launch_pdl"] = True
        try:
            launch.kernel.warmup(*types, **options, grid=launch.grid)
        except Exception as error:  # a candidate that does not fit this GPU
            return f"{config}: {str(error)[:200]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="m3-tp4", help=f"{', '.join(SHAPES)} or HxIxExK; several with commas")
    parser.add_argument("--tokens", default="1,16,64,256")
    parser.add_argument("--block-m", default="", help="try these instead of the rule's, such as 32,64")
    parser.add_argument("--show", type=int, default=4, help="candidates to print for each projection")
    parser.add_argument("--processes", type=int, default=8, help="compiler processes")
    arguments = parser.parse_args()
    arch = Target.of(torch.device("cuda")).arch
    shapes, block_ms = (
        [find_shape(x) for x in arguments.shape.split(",")],
        [int(x) for x in arguments.block_m.split(",") if x],
    )
    jobs = [
        (shape, tokens, arch, name, config)
        for shape in shapes
        for tokens in map(int, arguments.tokens.split(","))
        for name, config in block_configs(shape, tokens, arch, block_ms)
        if arguments.show or name == "rule"
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        problems = pool.map(_compile, jobs, chunksize=1)
    for problem in dict.fromkeys(filter(None, problems)):
        print(f"left out: {problem}")
    failed = {str(job[4]) for job, problem in zip(jobs, problems, strict=True) if problem}
    packed: PackedExperts | None = None
    of: Shape | None = None
    results: dict[str, list[tuple[float, str]]] = {}
    device = torch.device("cuda")
    for number, (shape, tokens, _, name, config) in enumerate(jobs):
        if packed is None or shape != of:
            packed = None  # two at once may not fit
            packed, of = random_packed(shape), shape
        if str(config) in failed:
            continue
        sets = [_launches(shape, tokens, packed, arch, config, seed) for seed in range(ROTATING_INPUTS)]
        for launches in sets:
            execute(launches, device)

        def seconds(chosen: Sequence[list[Launch]]) -> float:
            return graph_seconds([functools.partial(execute, launches, device) for launches in chosen], REPLAYS)

        if name == "rule":
            # The kernels of the sort only run together: each works on what the one before has left.
            sort = len(sets[0]) - 5
            groups = [*([range(sort)] if sort else []), *([i] for i in range(sort, len(sets[0])))]
            parts = [
                f"{'+'.join(sets[0][i].kernel.__name__.removesuffix('_kernel') for i in group)} "
                f"{seconds([[x[i] for i in group] for x in sets]) * 1e6:.1f}"
                for group in groups
            ]
            print(f"{shape.name} T={tokens} {config}: {seconds(sets) * 1e6:.1f} us = {', '.join(parts)}", flush=True)
        else:
            gemm = [i for i, x in enumerate(sets[0]) if _is_gemm(x)][PROJECTIONS.index(name)]
            time = seconds([[x[gemm]] for x in sets])
            results.setdefault(name, []).append((time, f"m{config.block_m} {getattr(config, name)}"))
        if number + 1 == len(jobs) or jobs[number + 1][3] == "rule":
            for projection, found in results.items():
                best = ", ".join(f"{text} {time * 1e6:.1f}" for time, text in sorted(found)[: arguments.show])
                print(f"    {projection}: {best}", flush=True)
            results = {}


if __name__ == "__main__":
    main()
