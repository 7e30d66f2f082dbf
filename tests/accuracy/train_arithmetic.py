"""Trains the small MiniMax-M3 whose accuracy is tested: `python tests/accuracy/train_arithmetic.py --output DIR`.

Writes config.json and model.safetensors (bf16) of the weights with the best answers to held-out problems. Needs torch,
transformers and this folder. The model computes in bf16, and AdamW keeps its weights in float32 beside it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arithmetic
import torch

REPORT_SECONDS = 20.0
WARM_UP_STEPS = 300
BALANCE_RATE = 1e-3


def model_class() -> Any:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    return modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM


def new_model() -> Any:
    """One dense layer and two with 16 experts, top-4 of which answer; 2.45 million parameters, bf16."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    config = MiniMaxM3VLTextConfig(
        vocab_size=arithmetic.VOCAB,
        hidden_size=192,
        intermediate_size=96,
        dense_intermediate_size=384,
        shared_intermediate_size=96,
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        rotary_dim=16,
        num_local_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=32,
        initializer_range=0.05,
        pad_token_id=arithmetic.PAD,
        bos_token_id=None,
        eos_token_id=arithmetic.END,
    )
    return model_class()._from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")


def load_model(folder: Path) -> Any:
    return model_class().from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="grouped_mm")


class Balance:
    """MiniMax's routing without an auxiliary loss: an expert with too many tokens gets a lower bias, and vice versa."""

    def __init__(self, model: Any) -> None:
        self.routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        self.biases = [router.e_score_correction_bias.float() for router in self.routers]
        self.loads: list[torch.Tensor] = []
        for router in self.routers:
            router.register_forward_hook(self._count)

    def _count(self, router: Any, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            ids = output[2].flatten()
            loads = torch.zeros(router.num_experts, device=ids.device)
            self.loads.append(loads.scatter_add_(0, ids, torch.ones_like(ids, dtype=loads.dtype)))

    @torch.no_grad()
    def update(self, rate: float) -> None:
        for router, bias, load in zip(self.routers, self.biases, self.loads, strict=True):
            bias.add_((load.mean() - load).sign(), alpha=rate)
            router.e_score_correction_bias.copy_(bias)
        self.loads.clear()


class Trainer:
    """One model, its float32 weights, and the optimizer of these."""

    def __init__(self, model: Any, peak: float) -> None:
        self.model, self.peak, self.steps = model, peak, 0
        self.balance = Balance(model)
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        matrices = [master for master in self.masters if master.dim() > 1]
        vectors = [master for master in self.masters if master.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, 0.98), eps=1e-9)

    def step(self, tokens: torch.Tensor, progress: float) -> torch.Tensor:
        """One step on tokens [B, LENGTH], ``progress`` (0 to 1) through the time; returns the loss, on the device."""
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        scale = cosine * min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * scale
        loss = arithmetic.answer_loss(self.model(tokens[:, :-1], use_cache=False).logits, tokens)
        loss.backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.publish()
        self.balance.update(BALANCE_RATE * scale)
        self.steps += 1
        return loss.detach()

    @torch.no_grad()
    def publish(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.masters, *self.balance.biases)]

    @torch.no_grad()
    def restore(self, snapshot: list[torch.Tensor]) -> None:
        """Back to a snapshot, with a new optimizer at half the learning rate."""
        for tensor, saved in zip((*self.masters, *self.balance.biases), snapshot, strict=True):
            tensor.copy_(saved)
        self.peak /= 2
        self._new_optimizer()
        self.publish()


def batches(seed: int, size: int, device: str) -> Callable[[], torch.Tensor]:
    """Returns what draws ``size`` training problems, half of them products, as tokens on the device."""
    tables = [arithmetic.encode(arithmetic.training_problems(operation)).byte().to(device) for operation in range(3)]
    counts = [size // 4, size // 4, size - 2 * (size // 4)]
    generator = torch.Generator(device).manual_seed(seed)

    def draw() -> torch.Tensor:
        rows = [
            table[torch.randint(len(table), (count,), generator=generator, device=device)]
            for table, count in zip(tables, counts, strict=True)
        ]
        return torch.cat(rows).long()

    return draw


def by_operation(correct: torch.Tensor) -> str:
    """Shares of right answers, where every operation has as many problems."""
    return " ".join(f"{float(part.double().mean()):.4f}" for part in correct.chunk(3))


def train(trainer: Trainer, draw: Callable[[], torch.Tensor], seconds: float, output: Path) -> None:
    """Trains until the time is over and keeps the best weights in ``output``."""
    validation = arithmetic.validation_problems()
    best, best_key = trainer.snapshot(), (-1.0, -math.inf)
    start = last = time.monotonic()
    total, count = torch.zeros((), device=trainer.model.device), 0
    while True:
        total += trainer.step(draw(), (time.monotonic() - start) / seconds)
        count += 1
        if count % 20 == 0 and trainer.model.device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock is not ahead of the device
        now = time.monotonic()
        over = now - start >= seconds
        if now - last < REPORT_SECONDS and not over:
            continue
        mean = float(total) / count
        scores = arithmetic.evaluate(trainer.model.eval(), validation)
        trainer.model.train()
        print(
            f"{now - start:6.1f} s  step {trainer.steps}  loss {mean:.5f}  held-out right {scores.accuracy:.4f} "
            f"(plus, minus, times: {by_operation(scores.correct)})  perplexity {scores.perplexity:.5f}",
            flush=True,
        )
        key = (scores.accuracy, -scores.perplexity)
        if not (math.isfinite(mean) and math.isfinite(scores.perplexity)):
            print("        not finite: back to the best weights at half the learning rate", flush=True)
            trainer.restore(best)
        elif key > best_key:
            best, best_key = trainer.snapshot(), key
            trainer.model.save_pretrained(output)
        total.zero_()
        count, last = 0, time.monotonic()
        if over:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small MiniMax-M3 that answers arithmetic problems.")
    parser.add_argument("--seconds", type=float, default=270.0, help="how long to train")
    parser.add_argument("--output", type=Path, required=True, help="folder of config.json and model.safetensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4096, help="problems a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its peak")
    parser.add_argument("--resume", action="store_true", help="go on from the weights in --output; new optimizer state")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    model = load_model(arguments.output) if arguments.resume else new_model()
    model = model.to(arguments.device).train()
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters on {arguments.device}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw = batches(arguments.seed + 1000 * arguments.resume, arguments.batch, arguments.device)
    train(Trainer(model, arguments.learning_rate), draw, arguments.seconds, arguments.output)

    saved = load_model(arguments.output).to(arguments.device).eval()
    exam = arithmetic.exam_problems()
    scores = arithmetic.evaluate(saved, exam)
    size = (arguments.output / "model.safetensors").stat().st_size
    print(
        f"saved {size / 1e6:.2f} MB; 1000 other held-out problems: right {scores.accuracy:.4f}, "
        f"perplexity {scores.perplexity:.5f}"
    )
    for row in arithmetic.answer_greedily(saved, exam[::250]):
        print(arithmetic.text(row))


if __name__ == "__main__":
    main()
