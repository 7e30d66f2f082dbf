"""Capture the ATen graph of a function, rewrite it, and run the original and the result side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_compile.passes.find_experts import MoEMatch, find_experts
from moe_compile.passes.fx_utils import is_copy
from moe_compile.passes.near_misses import NearMiss
from moe_compile.passes.rewrite import check_output, rewrite

# Relative L2 error between a block as its graph rounds it and the operator, which accumulates in float32.
# The original rounds to bf16 at every step, at the smallest sizes by up to 1.2e-2 of the result; the operator does not.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 3e-6}


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph with fake tensors, and real inputs to run it on: weights first, then arguments."""

    module: GraphModule
    inputs: tuple[Tensor, ...]
    num_weights: int

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def static_inputs(self) -> set[Node]:
        return set(self.placeholders[: self.num_weights])

    def find(self) -> list[MoEMatch | NearMiss]:
        return find_experts(self.graph, self.static_inputs)

    def nodes(self, target: object) -> list[Node]:
        """The calls of an operator (overload or packet), in graph order."""
        return [
            node
            for node in self.graph.nodes
            if node.target is target or getattr(node.target, "overloadpacket", None) is target
        ]

    def with_inputs(self, *inputs: Tensor) -> Captured:
        """The same graph with other arguments."""
        return Captured(self.module, (*self.inputs[: self.num_weights], *inputs), self.num_weights)

    def copy(self) -> Captured:
        return Captured(copy.deepcopy(self.module), self.inputs, self.num_weights)


def capture(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    decomposed: bool = False,
    dynamic: Sequence[int] = (),
    unbacked: Sequence[int] = (),
) -> Captured:
    """Trace a module (its parameters and buffers become the first inputs) or a function of tensors.

    Args:
        decomposed: use Inductor's decompositions.
        dynamic: positions in ``inputs`` whose first dimension is symbolic, the same symbol for all.
        unbacked: the same, with a symbol of which nothing is known.
    """
    if isinstance(function, nn.Module):
        state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
        names, weights = list(state), [tensor.detach() for tensor in state.values()]
        module = function

        def call(*args: Tensor) -> Any:
            given = dict(zip(names, args, strict=False))
            return torch.func.functional_call(module, given, args[len(names) :])
    else:
        weights, call = [], function
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes: list[Tensor] = [mode.from_tensor(tensor, static_shapes=True) for tensor in weights]
    symbol: Any = None
    for i, tensor in enumerate(inputs):
        if i not in (*dynamic, *unbacked):
            fakes.append(mode.from_tensor(tensor, static_shapes=True))
        elif i in dynamic:
            sizes = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            fakes.append(mode.from_tensor(tensor, symbolic_context=context))
        else:
            if symbol is None:
                symbol = shapes.create_unbacked_symint()
                torch._check(symbol >= 0)  # type: ignore[no-untyped-call]
            with mode:
                fakes.append(torch.empty((symbol, *tensor.shape[1:]), dtype=tensor.dtype))
    shapes.pending_fresh_unbacked_symbols.clear()
    functional = dispatch_functionalize(call)
    with mode, torch.no_grad(), enable_python_dispatcher():
        traced = make_fx(functional)(*fakes)
        _clean(traced)
        if decomposed:
            traced = make_fx(traced, decomposition_table=select_decomp_table())(*fakes)
            _clean(traced)
    return Captured(traced, (*weights, *inputs), len(weights))


def _clean(module: GraphModule) -> None:
    """Drop what functionalisation leaves behind, as AOTAutograd does."""
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.alias.default or (is_copy(node) and not node.users):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in the L2 norm."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def run(captured: Captured) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        found = captured.module(*captured.inputs)
    return list(found) if isinstance(found, list | tuple) else [found]


def rewrite_all(captured: Captured) -> tuple[Captured, list[MoEMatch | NearMiss]]:
    """A copy with every proven block rewritten to the reference operator, and what was found."""
    result = captured.copy()
    found = result.find()
    for match in found:
        if isinstance(match, MoEMatch):
            check_output(rewrite(result.graph, match, "reference", "auto"), match.root)
    result.graph.eliminate_dead_code()
    result.graph.lint()
    result.module.recompile()
    return result, found


def check_rewrite(captured: Captured, tolerance: float | None = None) -> list[MoEMatch | NearMiss]:
    """Rewrite what is proven, and hold the rewritten graph against the original on the real inputs.

    Returns what was found: callers say what it should be.
    """
    expected = run(captured)
    rewritten, found = rewrite_all(captured)
    for actual, wanted in zip(run(rewritten), expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert actual.shape == wanted.shape
        if not actual.is_floating_point():
            assert torch.equal(actual, wanted)
        elif actual.numel():
            limit = TOLERANCE[actual.dtype] if tolerance is None else tolerance
            error = relative_error(actual, wanted)
            assert error <= limit, f"relative L2 error {error:.2e} > {limit:.0e}"
    return found


def only_match(found: list[MoEMatch | NearMiss]) -> MoEMatch:
    assert len(found) == 1, [getattr(one, "reason", one) for one in found]
    (one,) = found
    assert isinstance(one, MoEMatch), one.reason
    return one


def only_miss(found: list[MoEMatch | NearMiss]) -> NearMiss:
    assert len(found) == 1, [getattr(one, "reason", one) for one in found]
    (one,) = found
    assert isinstance(one, NearMiss), one
    return one
