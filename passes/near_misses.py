"""What looks like an expert block and could not be proven to be one: one reason a block."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_compile.passes.fx_utils import Unproven, is_cast, is_float, module_path, same, source_location, value
from moe_compile.passes.row_expressions import ROW
from moe_compile.passes.row_provenance import RowProvenance


@dataclass(frozen=True)
class NearMiss:
    """Something that looks like an expert block and could not be proven to be one."""

    form: str
    reason: str
    node: Node
    name: str
    location: str | None


@dataclass(frozen=True)
class Failure:
    """A projection that is in no proven block. ``is_projection``: the GEMM itself was understood, its block was not."""

    node: Node
    inputs: tuple[Node, ...]
    form: str
    problem: Unproven
    is_projection: bool

    def near_miss(self) -> NearMiss:
        where = self.problem.node if self.problem.node is not None else self.node
        location = source_location(where) or source_location(self.node)
        return NearMiss(self.form, self.problem.reason, where, module_path(self.node), location)


def near_misses(failures: list[Failure], provenance: RowProvenance) -> dict[Node, NearMiss]:
    """One near miss for each block, by the node it stands for; ``failures`` are in graph order.

    The projections of one block fail together. A GEMM that was not understood says more than what that means for the
    other one; of two that were, the down projection's proof is the one that went through the whole block.
    """
    blocks: list[list[Failure]] = []
    for failure in failures:
        same_block = [b for b in blocks if any(_same_block(failure, other, provenance) for other in b)]
        blocks = [b for b in blocks if b not in same_block]
        blocks.append([*(other for b in same_block for other in b), failure])
    chosen = [next((f for f in block if not f.is_projection), block[-1]) for block in blocks]
    return {failure.node: failure.near_miss() for failure in chosen}


def _same_block(down: Failure, up: Failure, provenance: RowProvenance) -> bool:
    names = [module_path(f.node) for f in (down, up) if f.node.meta.get("nn_module_stack")]
    if len(names) == 2:
        return names[0] == names[1]
    return _reads(down, up.node, provenance)


def _reads(down: Failure, target: Node, provenance: RowProvenance) -> bool:
    """Whether ``down`` reads ``target`` through anything but routing and other layers."""
    sizes = [found for node in (target, *down.inputs) if (found := value(node)) is not None]
    stack, seen = list(down.inputs), set()
    while stack:
        node = stack.pop()
        if node is target:
            return True
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        found = value(node)
        if found is not None:
            if not is_cast(node) and (not is_float(node) or provenance.rows(node).index != ROW):
                continue  # routing, or the gather of the hidden states
            slots = any(same(a, size.shape[0]) for a in found.shape for size in sizes if size.dim())
            whole = any(same(found.numel(), size.numel()) for size in sizes)
            if found.dim() < 2 or not (slots or whole):
                continue  # routing weights
        stack.extend(node.all_input_nodes)
    return False
