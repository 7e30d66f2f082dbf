"""Small questions about FX nodes: what they call, their shape, where in the model they come from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from moe_compile.torch_internals import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Integers that hold every index and every count of a routing. Narrower ones overflow, and uint8 indexes as a mask.
INDICES = (torch.int32, torch.int64)


class Unproven(Exception):
    """A step of a proof failed: ``reason`` says why, ``node`` where."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def calls(node: object, *targets: object) -> bool:
    """Whether ``node`` calls one of these operators (overloads or overload packets)."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return any(node.target is target or packet is target for target in targets if target is not None)


def arg(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def source_of(node: Node) -> Node | None:
    """The first argument, if it is a node."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else None


def value(node: object) -> torch.Tensor | None:
    """The fake tensor that a node makes; None if it makes something else."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def tensor(node: object) -> torch.Tensor:
    """The fake tensor that a node makes.

    Raises:
        Unproven: the node makes something else, or was not annotated.
    """
    found = value(node)
    if found is None:
        raise Unproven(f"{describe(node)} is not a tensor of known shape", node if isinstance(node, Node) else None)
    return found


def shape(node: object) -> tuple[Any, ...]:
    """The shape, with symbolic sizes where they are dynamic."""
    return tuple(tensor(node).shape)


def rank(node: object) -> int | None:
    """The number of dimensions; None if the node makes no tensor."""
    found = value(node)
    return None if found is None else found.dim()


def has_dtype(node: object, dtypes: Iterable[torch.dtype]) -> bool:
    found = value(node)
    return found is not None and found.dtype in dtypes


def is_float(node: object) -> bool:
    return has_dtype(node, FLOATS)


def is_index(node: object) -> bool:
    """Whether a node makes integers wide enough for indices and counts."""
    return has_dtype(node, INDICES)


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for certain, without adding a guard."""
    return bool(statically_known_true(a == b))


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def numel(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def static(size: Any) -> int | None:
    """A size as an int, or None if it is symbolic."""
    return size if isinstance(size, int) else None


def dim(node: Node, index: int, name: str, rank: int, default: int = 0) -> int:
    """A dimension argument, made non-negative."""
    found = int(arg(node, index, name, default))
    return found + rank if found < 0 else found


def describe(node: object) -> str:
    """``aten.silu.default`` for a call, the name for a placeholder."""
    if not isinstance(node, Node):
        return repr(node)
    return str(node.target) if node.op == "call_function" else f"{node.op} {node.name}"


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_cast(node: object) -> bool:
    """A change of dtype that moves nothing and keeps the device."""
    if calls(node, prims.convert_element_type):
        return True
    if calls(node, aten._to_copy):
        assert isinstance(node, Node)
        return set(node.kwargs) <= {"dtype", "memory_format", "layout", "pin_memory"}
    return False


def is_float_cast(node: object) -> bool:
    """A change between float dtypes, which is no change of the real-valued function; float8 is not among them."""
    return is_cast(node) and isinstance(node, Node) and is_float(node) and is_float(source_of(node))


def without_float_casts(node: Node) -> Node:
    """What was cast to ``node``, through float dtypes."""
    while is_float_cast(node):
        source = source_of(node)
        assert source is not None
        node = source
    return node


def value_users(node: Node) -> list[Node]:
    """The users that read the values of ``node``, and not only its size and dtype."""
    only_size = (
        aten.sym_size, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like,
        aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full,
    )  # fmt: skip
    return [user for user in node.users if not calls(user, *only_size)]


def is_index_cast(node: object) -> bool:
    """A change between dtypes that both hold every index."""
    return is_cast(node) and isinstance(node, Node) and is_index(node) and is_index(source_of(node))


def is_copy(node: object) -> bool:
    """The same values in the same shape and dtype."""
    return calls(node, aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy)


def is_reshape(node: object) -> bool:
    """The same elements in the same order under another shape; ``view(dtype)`` reads other elements and is none."""
    return calls(
        node,
        aten.reshape,
        aten.view.default,
        aten._unsafe_view,
        aten.squeeze,
        aten.unsqueeze,
        aten.flatten,
        aten.unflatten,
    )


def swaps_last_two(node: object) -> bool:
    """A transposition of each matrix of a 3-D tensor."""
    if not isinstance(node, Node) or rank(node) != 3:
        return False
    if calls(node, aten.permute):
        return [d % 3 for d in arg(node, 1, "dims")] == [0, 2, 1]
    return calls(node, aten.transpose.int) and {dim(node, 1, "dim0", 3), dim(node, 2, "dim1", 3)} == {1, 2}


def is_zero(node: object) -> bool:
    """A scalar zero, or a tensor full of zeros."""
    while isinstance(node, Node) and (is_copy(node) or is_reshape(node) or calls(node, aten.expand) or is_cast(node)):
        node = source_of(node)
    if not isinstance(node, Node):
        return isinstance(node, int | float) and node == 0
    if calls(node, aten.full, aten.full_like):
        return bool(arg(node, 1, "fill_value") == 0)
    if calls(node, aten.new_full):
        return bool(arg(node, 2, "fill_value") == 0)
    if calls(node, aten.scalar_tensor):
        return bool(arg(node, 0, "s") == 0)
    return calls(node, aten.zeros, aten.zeros_like, aten.new_zeros)


def module_path(node: Node) -> str:
    """``model.layers.3.mlp.experts``: the innermost module that made the node, or the node's own name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path, _ = list(stack.values())[-1]
    path = re.sub(r"^L\['[^']*'\]\.?", "", str(path))
    path = re.sub(r"\.?_modules\['([^']*)'\]|\['([^']*)'\]", lambda m: f".{m.group(1) or m.group(2)}", path)
    return path.removeprefix("_orig_mod.").strip(".") or node.name


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_LIBRARY = re.compile(r"/torch/(nn|_ops|functional)|/transformers/(integrations|utils|activations)|/moe_compile/hf")


def source_location(node: Node) -> str | None:
    """``modeling_minimax_m2.py:122 in forward: hidden_states = self.experts(...)``: the innermost model code."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    model_code = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    for frame in reversed(model_code or frames):
        name = frame["file"].replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{frame['line']} in {frame['function']}: {frame['code'].strip()}"
    return None
