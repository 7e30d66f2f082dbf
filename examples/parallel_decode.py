"""MiniMax-M3 on several GPUs or processes: expert or tensor parallelism, rewritten on each rank, compared and timed.

    torchrun --nproc-per-node 2 examples/parallel_decode.py                  # tiny on CPUs (gloo)
    torchrun --nproc-per-node 2 examples/parallel_decode.py --full --plan tp # full width, shallow, on GPUs (NCCL)
    python examples/parallel_decode.py --full                                # one rank, for comparison

Each rank builds the same model, runs it whole, and then again under transformers' plan, with the experts in MXFP8 both
times. Prints the difference of the logits, the time of a decode step beside plain Inductor's, and memory.
Needs transformers 5.18 or newer with more than one rank; of the parallel plan's loading only the sharding is used.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import StaticCache
from transformers.distributed import DistributedConfig
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import moe_compile

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FULL = {"vocab_size": 8192}  # every other size is the model's own
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("ep", "tp"), default="ep")
    parser.add_argument("--full", action="store_true", help="full width; needs 15 GB a layer on each GPU")
    parser.add_argument("--layers", type=int, default=2, help="MoE layers")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64] if DEVICE == "cuda" else [1, 4])
    parser.add_argument("--steps", type=int, default=50 if DEVICE == "cuda" else 2)
    parser.add_argument("--moe-backend", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.02 if DEVICE == "cuda" else 1e-4)
    return parser.parse_args()


def build(args: argparse.Namespace) -> MiniMaxM3VLForCausalLM:
    """The whole model with random weights, the same on every rank."""
    given = {
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_local_experts": args.experts,
    }
    sizes = (FULL if args.full else TINY) | {name: size for name, size in given.items() if size is not None}
    config = MiniMaxM3VLTextConfig(
        **sizes,
        num_hidden_layers=args.layers,
        mlp_layer_types=["sparse"] * args.layers,
        layer_types=["full_attention"] * args.layers,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        model = MiniMaxM3VLForCausalLM._from_config(config, dtype=dtype, experts_implementation="grouped_mm")
    return model.eval().to(DEVICE)


def distribute(model: MiniMaxM3VLForCausalLM, plan: str, world: int) -> MiniMaxM3VLForCausalLM:
    """Apply transformers' plan in place, as from_pretrained does: from here on each rank holds its part."""
    if world == 1:
        return model
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        config = DistributedConfig(tp_size=world, ep_size=world if plan == "ep" else 1)
    else:  # transformers 5.17
        config = DistributedConfig(tp_size=world, tp_plan="auto", enable_expert_parallel=plan == "ep")
    config, _, mesh = type(model).prepare_distribute_model(config)
    model.config.distributed_config = config
    return type(model).maybe_distribute_model(model, config, mesh)


def decode_step(model: MiniMaxM3VLForCausalLM, batch: int, backend: str, args: argparse.Namespace) -> Callable:
    """One new token for each of ``batch`` sequences, in a static cache that holds 16; returns the logits."""
    torch._dynamo.reset()
    ids = torch.randint(3, model.config.vocab_size, (batch, 17), generator=torch.Generator().manual_seed(batch))
    ids = ids.to(DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :16], past_key_values=cache, use_cache=True)
    start = torch.full((batch, 1), 16, device=DEVICE)
    captured = {"mode": "reduce-overhead"} if DEVICE == "cuda" else {}
    if backend == "moe_rocm":
        inductor = DEVICE == "cuda"  # on a CPU the C++ compiler would take most of the time
        options = {"moe_backend": args.moe_backend, "strict": True, "inductor": inductor, **captured}
        compiled = torch.compile(model, backend=backend, options=options)
    else:
        compiled = torch.compile(model, backend=backend if DEVICE == "cuda" else "aot_eager", **captured)

    def step() -> torch.Tensor:
        # The same position each time, so that each step does the same work.
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(16)
        return compiled(ids[:, 16:], past_key_values=cache, position_ids=start, use_cache=True).logits.clone()

    return step


def milliseconds(step: Callable, steps: int) -> float:
    for _ in range(3):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def local_bytes(model: torch.nn.Module) -> int:
    return sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    say = print if rank == 0 else lambda *values: None
    model = build(args)
    with torch.no_grad():
        expected = {batch: decode_step(model, batch, "moe_rocm", args)() for batch in args.batch}
        whole = local_bytes(model)
        model = distribute(model, args.plan, world)
        for batch in args.batch:
            inductor = milliseconds(decode_step(model, batch, "inductor", args), args.steps)
            before = len(moe_compile.reports())
            step = decode_step(model, batch, "moe_rocm", args)
            error = relative_error(step(), expected[batch])
            ours = milliseconds(step, args.steps)
            report = moe_compile.reports()[before]
            print_error = f"logits differ from one rank's by {error:.1e}"
            say(f"batch {batch}: {print_error}; a step takes {ours:.2f} ms, {inductor:.2f} ms without moe_rocm")
            assert error < args.tolerance, error
            assert report.rewritten + report.from_cache > 0, report
            assert report.skipped == 0, report
    say(report)
    layers = [layer for one in moe_compile.reports() for layer in one.layers]
    found = layers[-1].spec
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak" if DEVICE == "cuda" else ""
    for one in range(world):
        if world > 1:
            dist.barrier()
        if one == rank:
            print(
                f"rank {rank}: {found.num_experts} experts of width {found.intermediate_size} run"
                f" {layers[-1].moe_backend};"
                f" weights {local_bytes(model) / 2**20:.1f} of {whole / 2**20:.1f} MiB,"
                f" packed experts {moe_compile.reports()[-1].packed_bytes / 2**20:.1f} MiB{memory}",
                flush=True,
            )
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    say(f"{args.plan} on {world} ranks: the same logits")


if __name__ == "__main__":
    main()
