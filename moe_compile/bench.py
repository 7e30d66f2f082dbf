"""``moe-compile bench``: one expert block on this GPU, as multiples of what its memory and matrix units allow.

Every contender runs the same routing on the same hidden states, in CUDA graphs that are replayed over several rotating
input sets, so that neither the L2 cache nor launch overhead decides. A time is the median of the replays, per call. The
floor of a call is

    max(bytes / copy bandwidth, FLOPs / bf16 matrix rate)

with the MXFP8 bytes (weights and scales) of the experts that the tokens hit plus the activations read and written. Both
ceilings are measured in the same run.
"""

from __future__ import annotations

import csv
import datetime
import functools
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_compile import packed_weights
from moe_compile.errors import BenchError, nearest
from moe_compile.kernels.ops import attributes, operator
from moe_compile.spec import ExpertSpec, GateFunction

ROTATING_INPUTS = 8
REPLAYS = 20


@dataclass(frozen=True)
class Shape:
    """One rank's expert block: H hidden, I intermediate, E experts, K experts a token."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gate: GateFunction = GateFunction()

    @property
    def weight_count(self) -> int:
        """Elements of one expert's gate, up and down projections."""
        return 3 * self.hidden_size * self.intermediate_size


OAI = GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("m3", 6144, 3072, 128, 4, OAI),
        Shape("m3-tp4", 6144, 768, 128, 4, OAI),
        Shape("m3-tp8", 6144, 384, 128, 4, OAI),
        Shape("m2", 3072, 1536, 256, 8),
        Shape("m2-tp4", 3072, 384, 256, 8),
        Shape("minimax-text", 6144, 9216, 32, 2),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("deepseek-v3-tp8", 7168, 256, 256, 8),
    )
}


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does, measured: bytes per second of a device-to-device copy, bf16 FLOPs per second of a GEMM."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True)
class Measurement:
    """One contender at one number of tokens. Times in seconds, ``error`` relative L2 to the float64 formula."""

    shape: str
    tokens: int
    contender: str
    seconds: float
    floor: float
    nbytes: int
    flops: int
    error: float | None = None

    @property
    def ratio(self) -> float:
        return self.seconds / self.floor

    @property
    def bandwidth(self) -> float:
        return self.nbytes / self.seconds

    @property
    def rate(self) -> float:
        return self.flops / self.seconds


@dataclass(frozen=True)
class Inputs:
    """One routing of T tokens."""

    hidden_states: torch.Tensor  # (T, H) bf16
    topk_ids: torch.Tensor  # (T, K) int64
    topk_weights: torch.Tensor  # (T, K) float32


@dataclass(frozen=True)
class Weights:
    """bf16 weights and the gate function, as a transformers experts module holds them."""

    gate_up_proj: torch.Tensor  # (E, 2I, H)
    down_proj: torch.Tensor  # (E, H, I)


def find_shape(text: str) -> Shape:
    """A named shape, or ``HxIxExK`` such as ``4096x1536x128x8``.

    Raises:
        BenchError: neither; the message lists the names.
    """
    if text in SHAPES:
        return SHAPES[text]
    parts = text.lower().split("x")
    if len(parts) == 4 and all(part.isdigit() and int(part) > 0 for part in parts):
        hidden, intermediate, experts, top_k = map(int, parts)
        if top_k <= experts:
            return Shape(text, hidden, intermediate, experts, top_k)
    raise BenchError(
        f"unknown shape {text!r}: give HxIxExK with K <= E, such as 4096x1536x128x8, or one of {', '.join(SHAPES)}."
        + nearest(text, SHAPES)
    )


def parse_tokens(text: str) -> list[int]:
    """``"1,16"`` -> [1, 16].

    Raises:
        BenchError: something else than positive numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise BenchError(f"--tokens {text!r}: give positive numbers separated by commas, such as 1,16,256")
    return [int(part) for part in parts]


def measure_ceilings() -> Ceilings:
    """Read and write 4 GiB, multiply 8192 x 8192 matrices."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # An elementwise kernel: a copy becomes a memcpy node of the graph, which moved 2.7 TB/s on an H200, and this 4.3.
    copy = graph_seconds([lambda: torch.neg(source, out=target)])
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_seconds([lambda: torch.mm(a, b)])
    return Ceilings(2 * source.nbytes / copy, 2 * 8192**3 / product)


def graph_seconds(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """Median seconds of one of ``calls``, captured one after the other in a single graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    seconds: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3 / len(calls))
    del kept
    return statistics.median(seconds)


def make_weights(shape: Shape) -> Weights:
    """Random bf16 weights, scaled so that the gate function's limits matter."""
    torch.manual_seed(0)
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    gate_up = torch.empty(e, 2 * i, h, device="cuda", dtype=torch.bfloat16).normal_(std=2 * h**-0.5)
    down = torch.empty(e, h, i, device="cuda", dtype=torch.bfloat16).normal_(std=i**-0.5)
    return Weights(gate_up, down)


def make_inputs(shape: Shape, tokens: int, seed: int) -> Inputs:
    """Uniform routing without repetition in a row."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    hidden = torch.randn(tokens, shape.hidden_size, device="cuda", generator=generator).to(torch.bfloat16)
    scores = torch.rand(tokens, shape.num_experts, device="cuda", generator=generator)
    weights, ids = scores.topk(shape.top_k, dim=-1)
    return Inputs(hidden, ids, weights / weights.sum(dim=-1, keepdim=True))


def cost(shape: Shape, inputs: Inputs) -> tuple[int, int]:
    """``(bytes, FLOPs)`` that a call cannot avoid."""
    hit = len(set(inputs.topk_ids.flatten().tolist()))
    tokens = inputs.hidden_states.shape[0]
    weights = hit * shape.weight_count * 33 // 32
    activations = 2 * inputs.hidden_states.numel() * inputs.hidden_states.element_size()
    return weights + activations, 2 * tokens * shape.top_k * shape.weight_count


def triton_experts(shape: Shape, weights: Weights, activations: str = "auto") -> Callable[[Inputs], torch.Tensor]:
    """This package's Triton operator."""
    spec = ExpertSpec(shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k, gate=shape.gate)
    keywords = attributes(spec, activations)

    def call(inputs: Inputs) -> torch.Tensor:
        out: torch.Tensor = operator("triton")(
            inputs.hidden_states,
            inputs.topk_ids,
            inputs.topk_weights,
            weights.gate_up_proj,
            weights.down_proj,
            **keywords,
        )
        return out

    return call


def transformers_experts(shape: Shape, weights: Weights, spelling: str) -> Callable[[Inputs], torch.Tensor]:
    """transformers' own experts forward under plain Inductor."""
    from transformers.integrations import moe

    forward = getattr(moe, f"{spelling}_experts_forward")

    class Experts(torch.nn.Module):
        has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False
        _is_expert_parallel = False

        def __init__(self) -> None:
            super().__init__()
            self.num_experts = shape.num_experts
            self.gate_up_proj = torch.nn.Parameter(weights.gate_up_proj, requires_grad=False)
            self.down_proj = torch.nn.Parameter(weights.down_proj, requires_grad=False)

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return shape.gate(*gate_up.chunk(2, dim=-1))

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = forward(self, hidden, ids, topk_weights)
            return out

    compiled = torch.compile(Experts(), backend="inductor", dynamic=False)
    return lambda inputs: compiled(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)


CONTENDERS: dict[str, Callable[[Shape, Weights], Callable[[Inputs], torch.Tensor]]] = {
    "triton": triton_experts,
    "triton-a8w8": lambda shape, weights: triton_experts(shape, weights, "mxfp8"),
    "hf-grouped_mm": lambda shape, weights: transformers_experts(shape, weights, "grouped_mm"),
    "hf-batched_mm": lambda shape, weights: transformers_experts(shape, weights, "batched_mm"),
}
BATCHED_MM_LIMIT = 64  # tokens: it gathers one weight matrix a slot, 151 MB each at m3


def run_bench(
    shape: Shape,
    token_counts: Sequence[int],
    contenders: Sequence[str],
    step: Callable[[Measurement], None],
    ceilings: Ceilings | None = None,
) -> tuple[Ceilings, list[Measurement]]:
    """Measure every contender at every token count; ``step`` gets each measurement as it is made.

    Raises:
        BenchError: no GPU, or an unknown contender.
    """
    for name in contenders:
        if name not in CONTENDERS:
            raise BenchError(
                f"unknown contender {name!r}: choices are {', '.join(CONTENDERS)}." + nearest(name, CONTENDERS)
            )
    if not torch.cuda.is_available():
        raise BenchError("moe-compile bench measures a GPU, and there is none here")
    packed_weights.clear()
    torch.compiler.reset()
    ceilings = ceilings or measure_ceilings()
    weights = make_weights(shape)
    found = []
    with torch.no_grad():
        calls = {name: CONTENDERS[name](shape, weights) for name in contenders}
        for tokens in token_counts:
            sets = [make_inputs(shape, tokens, seed) for seed in range(ROTATING_INPUTS if tokens <= 4096 else 2)]
            costs = [cost(shape, inputs) for inputs in sets]
            nbytes, flops = (round(statistics.mean(c[i] for c in costs)) for i in range(2))
            floor = max(nbytes / ceilings.bandwidth, flops / ceilings.matrix_rate)
            for name, call in calls.items():
                if name == "hf-batched_mm" and tokens > BATCHED_MM_LIMIT:
                    continue
                seconds = graph_seconds([functools.partial(call, inputs) for inputs in sets])
                found.append(Measurement(shape.name, tokens, name, seconds, floor, nbytes, flops))
                step(found[-1])
    return ceilings, found


def line(m: Measurement) -> str:
    """One measurement as a line of text; lines align."""
    return (
        f"{m.shape:<12} T={m.tokens:<6} {m.contender:<14} {m.seconds * 1e6:>9.1f} us  floor {m.floor * 1e6:>8.1f}"
        f"  x{m.ratio:>5.2f}  {m.bandwidth / 1e12:>5.2f} TB/s  {m.rate / 1e12:>5.0f} TFLOP/s"
    )


def summary(ceilings: Ceilings) -> str:
    """The machine behind the measurements."""
    return (
        f"{torch.cuda.get_device_name()}: {ceilings.bandwidth / 1e12:.2f} TB/s, {ceilings.matrix_rate / 1e12:.0f} bf16 "
        f"TFLOP/s; torch {torch.__version__}; {datetime.datetime.now(datetime.UTC).date().isoformat()}"
    )


def write_csv(path: str, measurements: Sequence[Measurement], ceilings: Ceilings) -> None:
    """Write :func:`to_csv` to ``path``.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        with open(path, "w") as file:
            file.write(to_csv(measurements, ceilings))
    except OSError as error:
        raise BenchError(f"cannot write {path!r}: {error.strerror}") from None


def to_csv(measurements: Sequence[Measurement], ceilings: Ceilings) -> str:
    """One row a measurement, with the GPU, the versions and the date in every row."""
    import triton

    common = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "copy_tb_s": f"{ceilings.bandwidth / 1e12:.3f}",
        "bf16_tflop_s": f"{ceilings.matrix_rate / 1e12:.0f}",
    }
    text = io.StringIO()
    columns = ["shape", "tokens", "contender", "us", "floor_us", "ratio", "tb_s", "tflop_s", *common]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for m in measurements:
        writer.writerow(
            {
                "shape": m.shape,
                "tokens": m.tokens,
                "contender": m.contender,
                "us": f"{m.seconds * 1e6:.1f}",
                "floor_us": f"{m.floor * 1e6:.1f}",
                "ratio": f"{m.ratio:.2f}",
                "tb_s": f"{m.bandwidth / 1e12:.2f}",
                "tflop_s": f"{m.rate / 1e12:.0f}",
                **common,
            }
        )
    return text.getvalue()
