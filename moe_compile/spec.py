"""What one expert block computes, free of any graph or hardware.

One legend everywhere: T tokens, K top-k, E experts, H hidden size, I intermediate size.

``out[t] = sum_k topk_weights[t, k] * down[e] @ act(gate[e] @ x[t], up[e] @ x[t])``,  ``e = topk_ids[t, k]``
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

GateUpLayout = Literal["concatenated", "interleaved"]
GATE_UP_LAYOUTS: tuple[str, ...] = get_args(GateUpLayout)


@dataclass(frozen=True)
class GateFunction:
    """The pointwise function between the two GEMMs, ``out = A(gate) * U(up)``.

    In this order (each step is absent at its default):

    1. ``limit`` with ``limit_after=False``: ``gate = min(gate, limit)``; with any limit:
       ``up = clamp(up, -limit, limit)``
    2. ``A``: ``silu`` is ``gate * sigmoid(alpha * gate)``; ``gelu`` is the erf form, ``gelu_tanh`` the tanh form;
       ``relu``; ``relu2`` is ``relu(gate)**2``. With ``gate_softcap = c`` the factor ``gate`` of silu becomes
       ``c * tanh(gate / c)``: ``c * tanh(gate / c) * sigmoid(alpha * gate)``.
    3. ``limit_after=True``: ``A = min(A, limit)``
    4. ``U``: ``up + up_offset``, or with ``up_softcap = c``: ``c * tanh(up / c) + up_offset``

    ``gated=False`` has no up projection: ``out = A(x)``.

    Known members: MiniMax-M2, Mixtral, Qwen3: ``silu``. MiniMax-M3 and gpt-oss ("swiglu_oai"): ``silu, alpha=1.702,
    limit=7, up_offset=1``. DeepSeek-V4: ``silu, limit=10``. Step-3: ``silu, limit, limit_after``. Gemma-4:
    ``gelu_tanh``. Inkling-2: ``silu, gate_softcap=4, up_softcap=25``. Nemotron-H: ``relu2, gated=False``.
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    limit_after: bool = False
    up_offset: float = 0.0
    gate_softcap: float | None = None
    up_softcap: float | None = None
    gated: bool = True

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {self.activation!r}, choices are {', '.join(ACTIVATIONS)}")
        if self.activation != "silu" and (self.alpha != 1.0 or self.gate_softcap is not None):
            raise ValueError(f"alpha and gate_softcap belong to silu, got activation={self.activation!r}")
        for name in ("limit", "gate_softcap", "up_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, got {value!r}")
        if self.limit_after and self.limit is None:
            raise ValueError("limit_after=True needs a limit")
        if not self.gated and (self.up_offset != 0.0 or self.up_softcap is not None):
            raise ValueError("a gate function without an up projection has no up_offset and no up_softcap")

    def __str__(self) -> str:
        """``silu``, ``silu(alpha=1.702, limit=7, up_offset=1)``: only what differs from the default."""
        parts = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
        return self.activation + (f"({', '.join(parts)})" if parts else "")

    def __call__(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Evaluate in the dtype of ``gate``; both tensors have one shape. ``up`` is None when ``gated`` is False."""
        if (up is None) == self.gated:
            raise ValueError(f"gated={self.gated}, but up is {'missing' if up is None else 'given'}")
        if self.limit is not None and not self.limit_after:
            gate = gate.clamp(max=self.limit)
        if self.activation == "silu":
            factor = gate if self.gate_softcap is None else self.gate_softcap * torch.tanh(gate / self.gate_softcap)
            out = factor * torch.sigmoid(self.alpha * gate)
        elif self.activation == "gelu":
            out = torch.nn.functional.gelu(gate)
        elif self.activation == "gelu_tanh":
            out = torch.nn.functional.gelu(gate, approximate="tanh")
        else:
            out = torch.relu(gate)
            if self.activation == "relu2":
                out = out * out
        if self.limit is not None and self.limit_after:
            out = out.clamp(max=self.limit)
        if up is None:
            return out
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        if self.up_softcap is not None:
            up = self.up_softcap * torch.tanh(up / self.up_softcap)
        return out * (up + self.up_offset)


@dataclass(frozen=True)
class ExpertSpec:
    """Everything static about one expert block: sizes, layout, dtypes and the gate function.

    ``gate_up_proj`` is (E, 2I, H), or (E, H, 2I) if ``transposed`` (then ``down_proj`` is (E, I, H)); its 2I rows are
    all gate rows then all up rows (``concatenated``) or alternate (``interleaved``), and ``up_first`` swaps the two.
    Without a gate (``gate.gated`` False) it has I rows.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    gate: GateFunction = GateFunction()
    gate_up_layout: str = "concatenated"
    up_first: bool = False
    transposed: bool = False
    has_bias: bool = False
    has_expert_map: bool = False
    weight_format: str = "bf16"
    activation_dtype: torch.dtype = torch.bfloat16
    routing_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.gate_up_layout not in GATE_UP_LAYOUTS:
            raise ValueError(f"gate_up_layout: got {self.gate_up_layout!r}, choices are {', '.join(GATE_UP_LAYOUTS)}")

    @property
    def sizes(self) -> str:
        """``H64 I96 E8 k2``, as in the tables."""
        return f"H{self.hidden_size} I{self.intermediate_size} E{self.num_experts} k{self.top_k}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, GateFunction):
                data[field.name] = {f.name: getattr(value, f.name) for f in fields(value)}
            elif isinstance(value, torch.dtype):
                data[field.name] = str(value).removeprefix("torch.")
            else:
                data[field.name] = value
        return data
