"""Small expert blocks in plain PyTorch, written as Hugging Face writes them and in other ways that mean the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_compile.kernels import mxfp8
from moe_compile.spec import GateFunction

TwoArguments = Callable[[Tensor, Tensor], Tensor]


def _oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _softcaps(gate: Tensor, up: Tensor) -> Tensor:
    g, u = gate.float(), up.float()
    return (4.0 * torch.tanh(g / 4.0) * torch.sigmoid(g) * (25.0 * torch.tanh(u / 25.0))).to(gate.dtype)


# The families of Hugging Face models, as their code spells them, with what they are.
GATES: dict[str, tuple[TwoArguments, GateFunction]] = {
    "silu": (lambda g, u: F.silu(g) * u, GateFunction()),
    "silu_fp32": (lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype), GateFunction()),
    "silu_by_exp": (lambda g, u: u * (g / (1 + torch.exp(-g))), GateFunction()),
    "deepseek_v4": (lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-10.0, 10.0), GateFunction(limit=10.0)),
    "swiglu_oai": (_oai, GateFunction(alpha=1.702, limit=7.0, up_offset=1.0)),
    "step3p7": (
        lambda g, u: F.silu(g).clamp(max=7.0) * u.clamp(min=-7.0, max=7.0),
        GateFunction(limit=7.0, limit_after=True),
    ),
    "gelu_tanh": (lambda g, u: F.gelu(g, approximate="tanh") * u, GateFunction("gelu_tanh")),
    "gelu": (lambda g, u: F.gelu(g) * u, GateFunction("gelu")),
    "inkling2": (_softcaps, GateFunction(gate_softcap=4.0, up_softcap=25.0)),
    "relu": (lambda g, u: F.relu(g) * u, GateFunction("relu")),
}
UNGATED: dict[str, tuple[Callable[[Tensor], Tensor], GateFunction]] = {
    "relu2": (lambda x: torch.square(F.relu(x)), GateFunction("relu2", gated=False)),
    "silu": (F.silu, GateFunction(gated=False)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), GateFunction("gelu_tanh", gated=False)),
}


@dataclass(frozen=True)
class Spelling:
    """One way of writing an expert block. The defaults are transformers' ``grouped_mm``."""

    form: str = "grouped_mm"  # or batched_mm
    gate: str = "silu"
    gated: bool = True
    interleaved: bool = False
    up_first: bool = False
    transposed: bool = False
    bias: bool = False
    masks: str = "none"  # or 5.17, 5.24: where the two versions of transformers clamp ids and zero sentinel rows
    sort: str = "sort"  # or sort_stable, argsort, argsort_stable
    gather: str = "index"  # or index_select
    tokens: str = "divide"  # or repeat_interleave, expand
    count_dtype: torch.dtype = torch.float32
    inverse: str = "index_put"  # or scatter, argsort
    weighting: str = "before"  # or after un-sorting
    reduction: str = "sum"  # or index_add, scatter_add, index_put, keepdim
    cast_weights: bool = False  # to the activations' dtype, after their routing

    def __str__(self) -> str:
        default = Spelling()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)]
        return ",".join(parts) or "default"


def representable(weight: Tensor, contracted: int) -> Tensor:
    """The nearest weight that MXFP8 along dimension ``contracted`` holds exactly."""
    moved = weight.movedim(contracted, -1).contiguous()
    return mxfp8.dequantize(*mxfp8.quantize(moved), torch.float32).to(weight.dtype).movedim(-1, contracted).contiguous()


class Experts(nn.Module):
    """An expert block ``(hidden_states (T, H), topk_ids (T, K), topk_weights (T, K)) -> (T, H)``.

    Its weights are exact in MXFP8, so that packing them changes nothing and the original is the oracle.
    """

    def __init__(
        self,
        spelling: Spelling = Spelling(),
        *,
        experts: int = 4,
        hidden: int = 32,
        intermediate: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.spelling, self.num_experts = spelling, experts
        generator = torch.Generator().manual_seed(seed)
        columns = intermediate * (2 if spelling.gated else 1)

        def parameter(*sizes: int, contracted: int | None = None, scale: float) -> nn.Parameter:
            value = (torch.randn(sizes, generator=generator) * scale).to(dtype)
            return nn.Parameter(value if contracted is None else representable(value, contracted), requires_grad=False)

        up, down, contracted = (experts, columns, hidden), (experts, hidden, intermediate), 2
        if spelling.transposed:
            up, down, contracted = (experts, hidden, columns), (experts, intermediate, hidden), 1
        # Wide enough that limits and caps matter.
        self.gate_up_proj = parameter(*up, contracted=contracted, scale=4 * hidden**-0.5)
        self.down_proj = parameter(*down, contracted=contracted, scale=intermediate**-0.5)
        if spelling.bias:
            self.gate_up_proj_bias = parameter(experts, columns, scale=1.0)
            self.down_proj_bias = parameter(experts, hidden, scale=1.0)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        forward = _grouped if self.spelling.form == "grouped_mm" else _batched
        return forward(self, hidden_states, topk_ids, topk_weights)

    def activate(self, gate_up: Tensor) -> Tensor:
        s = self.spelling
        if not s.gated:
            return UNGATED[s.gate][0](gate_up)
        first, second = (gate_up[..., ::2], gate_up[..., 1::2]) if s.interleaved else gate_up.chunk(2, dim=-1)
        return GATES[s.gate][0](second, first) if s.up_first else GATES[s.gate][0](first, second)

    @property
    def gate(self) -> GateFunction:
        return (GATES if self.spelling.gated else UNGATED)[self.spelling.gate][1]


def take(spelling: Spelling, source: Tensor, index: Tensor) -> Tensor:
    return source[index] if spelling.gather == "index" else source.index_select(0, index)


def tokens_of_slots(
    spelling: Spelling, num_tokens: int, top_k: int, perm: Tensor | None, device: torch.device
) -> Tensor:
    """(S,) the token of each slot, in the order of ``perm``."""
    if spelling.tokens == "divide":
        slots = torch.arange(num_tokens * top_k, device=device) if perm is None else perm
        return slots // top_k
    tokens = torch.arange(num_tokens, device=device)
    if spelling.tokens == "expand":
        tokens = tokens.unsqueeze(1).expand(num_tokens, top_k).reshape(-1)
    else:
        tokens = tokens.repeat_interleave(top_k)
    return tokens if perm is None else tokens[perm]


def inverse_of(spelling: Spelling, perm: Tensor) -> Tensor:
    if spelling.inverse == "argsort":
        return torch.argsort(perm)
    places = torch.arange(perm.size(0), device=perm.device)
    if spelling.inverse == "scatter":
        return torch.empty_like(perm).scatter(0, perm, places)
    inverse = torch.empty_like(perm)
    inverse[perm] = places
    return inverse


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    weight = weight if transposed else weight.transpose(-2, -1)
    if weight.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=offsets)
    return grouped_mm_fallback()(x, weight, offsets)


def grouped_mm_fallback() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """transformers' operator for other dtypes than bfloat16, or without that library one of the same meaning."""
    if importlib.util.find_spec("transformers") is not None:
        import transformers.integrations.moe  # noqa: F401
    elif not hasattr(torch.ops.transformers, "grouped_mm_fallback"):

        def fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
            out = input.new_zeros(input.size(0), weight.size(2))
            start = 0
            for expert, end in enumerate(offs.tolist()):
                out[start:end] = input[start:end] @ weight[expert]
                start = end
            return out

        schema = "(Tensor input, Tensor weight, Tensor offs) -> Tensor"
        torch.library.custom_op("transformers::grouped_mm_fallback", fallback, mutates_args=(), schema=schema)
        torch.library.register_fake(
            "transformers::grouped_mm_fallback", lambda input, weight, offs: input.new_empty(len(input), weight.size(2))
        )
    return torch.ops.transformers.grouped_mm_fallback


def add_up(spelling: Spelling, out: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """(S, H) rows, each added to its token."""
    total = torch.zeros(num_tokens, out.shape[1], dtype=out.dtype, device=out.device)
    if spelling.reduction == "index_add":
        return total.index_add(0, tokens, out)
    if spelling.reduction == "scatter_add":
        return total.scatter_add(0, tokens.unsqueeze(-1).expand(-1, out.shape[1]), out)
    return total.index_put((tokens,), out, accumulate=True)


def _finish(module: Experts, out: Tensor, weights: Tensor, perm: Tensor | None, sizes: tuple[int, int]) -> Tensor:
    """Weighting, un-sorting and the sum: (S, H) in the order of ``perm`` -> (T, H)."""
    s = module.spelling
    num_tokens, top_k = sizes
    in_slot_order = perm is not None and s.reduction in ("sum", "keepdim")
    routed = weights.reshape(-1)
    after = in_slot_order and s.weighting == "after"
    if perm is not None and not after:
        routed = take(s, routed, perm)
    if s.cast_weights:
        routed = routed.to(out.dtype)
    if not after:
        out = out * routed.unsqueeze(-1)
    if in_slot_order:
        assert perm is not None
        out = take(s, out, inverse_of(s, perm))
    if after:
        out = out * routed.unsqueeze(-1)
    if s.reduction in ("sum", "keepdim"):
        out = out.view(num_tokens, top_k, out.shape[-1])
        return out.sum(dim=1) if s.reduction == "sum" else out.sum(dim=1, keepdim=True).squeeze(1)
    return add_up(s, out, tokens_of_slots(s, num_tokens, top_k, perm, out.device), num_tokens)


def _grouped(module: Experts, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    s, num_experts = module.spelling, module.num_experts
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.reshape(-1)
    if s.sort.startswith("argsort"):
        perm = torch.argsort(ids, stable=s.sort == "argsort_stable")
        sorted_ids = ids[perm]
    else:
        sorted_ids, perm = torch.sort(ids, stable=s.sort == "sort_stable")
    x = take(s, hidden_states, tokens_of_slots(s, num_tokens, top_k, perm, ids.device))
    counts = torch.histc(sorted_ids.to(s.count_dtype), bins=num_experts, min=0, max=num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    mask = None
    if s.masks != "none":
        mask = (sorted_ids >= num_experts).unsqueeze(-1)
        sorted_ids.clamp_(max=num_experts - 1)
        x.masked_fill_(mask, 0.0)
    out = grouped_linear(x, module.gate_up_proj, offsets, s.transposed)
    if s.bias:
        out.add_(module.gate_up_proj_bias[sorted_ids])
    if mask is not None:
        out = out.masked_fill(mask, 0.0)
    out = module.activate(out)
    out = grouped_linear(out, module.down_proj, offsets, s.transposed)
    if s.bias:
        out.add_(module.down_proj_bias[sorted_ids])
    if mask is not None:
        out = out.masked_fill(mask, 0.0)
    return _finish(module, out, topk_weights, perm, (num_tokens, top_k)).to(hidden_states.dtype)


def _batched(module: Experts, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    s = module.spelling
    num_tokens, top_k = topk_ids.shape
    ids, weights = topk_ids.reshape(-1), topk_weights.reshape(-1)
    if s.masks == "5.24":
        weights = weights.masked_fill(ids >= module.num_experts, 0.0)
    if s.masks != "none":
        ids = ids.clamp(0, module.num_experts - 1)
    if s.tokens == "repeat_interleave":
        x = hidden_states.repeat_interleave(top_k, dim=0)
    elif s.tokens == "expand":
        x = hidden_states.unsqueeze(1).expand(num_tokens, top_k, hidden_states.shape[1]).reshape(ids.numel(), -1)
    else:
        x = take(s, hidden_states, torch.arange(num_tokens * top_k, device=ids.device) // top_k)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        chosen = take(s, weight, ids)
        if s.transposed:
            out = torch.bmm(x.unsqueeze(1), chosen).squeeze(1)
        else:
            out = torch.bmm(chosen, x.unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out.add_(bias[ids])

    out = linear(x, module.gate_up_proj, module.gate_up_proj_bias if s.bias else None)
    out = module.activate(out)
    out = linear(out, module.down_proj, module.down_proj_bias if s.bias else None)
    return _finish(module, out, weights, None, (num_tokens, top_k)).to(hidden_states.dtype)


@dataclass(frozen=True)
class Inputs:
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.hidden_states, self.topk_ids, self.topk_weights))


def random_inputs(
    module: Experts,
    tokens: int = 6,
    top_k: int = 2,
    *,
    routing_dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    sentinels: bool = False,
    seed: int = 1,
) -> Inputs:
    """Random routing with repeated experts; a sentinel slot has id E and weight zero, as transformers makes them."""
    generator = torch.Generator().manual_seed(seed)
    weight = module.gate_up_proj
    hidden = weight.shape[1 if module.spelling.transposed else 2]
    x = torch.randn(tokens, hidden, generator=generator).to(weight.dtype)
    ids = torch.randint(0, module.num_experts, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    if sentinels:
        absent = torch.rand(tokens, top_k, generator=generator) < 0.3
        ids, weights = ids.masked_fill(absent, module.num_experts), weights.masked_fill(absent, 0.0)
    return Inputs(x, ids.to(ids_dtype), weights.to(routing_dtype))
