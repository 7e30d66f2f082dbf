"""Two MoE layers that compile in a second, with the mistakes that people make in one of them, and dumps of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from moe_modules import Experts, H, MoE, hidden_states
from torch import Tensor, nn

VOCAB = 50


class SwappedExperts(Experts):
    """Takes gate for up."""

    def gate(self, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class DropoutExperts(Experts):
    """A dropout between the two GEMMs, left on when the model serves."""

    def gate(self, gate_up: Tensor) -> Tensor:
        return nn.functional.dropout(super().gate(gate_up), 0.1)


class TwoLayers(nn.Module):
    """Two MoE layers and a head, bf16, seeded; ``second`` are the experts of ``layers.1``."""

    def __init__(self, second: type[Experts] = Experts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([MoE(), MoE()])
        experts = self.layers[1].experts
        experts.__class__ = second
        self.head = nn.Linear(H, VOCAB, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:  # (T, H) -> (T, VOCAB)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def compile_and_run(model: nn.Module, *args: Any, **options: Any) -> Tensor:
    """One call of the compiled model; Inductor is left out unless asked for."""
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="moe_rocm", options={"inductor": False, **options})
    with torch.no_grad():
        result: Tensor = compiled(*(args or (hidden_states(),)))
    return result


def run_file(path: Path) -> subprocess.CompletedProcess[str]:
    """``python FILE``, as the index page says."""
    return subprocess.run([sys.executable, path.name], cwd=path.parent, capture_output=True, text=True)
