"""A captured graph as a Python file that people can read and that Python can run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compile.dump_run import InputSpec
from moe_compile.passes.fx_utils import module_path
from moe_compile.torch_internals import FakeTensor, size_hint

_HEADER = '''"""{title}

    python {file}

runs it: inputs from {inputs} where they were recorded, else random; and compares with the recorded outputs.
"""

{imports}
from run_graph import main

INPUTS = [
{specs}]
{classes}

if __name__ == "__main__":
    main({root}, INPUTS, {inputs!r}, {outputs!r}, __file__)
'''
# What python_code may leave in its globals without an import path of its own.
_IMPORTS = {
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "NoneType = type(None)",
    "torch": "import torch",
    "device": "from torch import device",
    "fx_pytree": "import torch.fx._pytree as fx_pytree",
    "pytree": "import torch.utils._pytree as pytree",
}


@dataclass(frozen=True)
class GraphFile:
    """``text`` is the file; ``specs`` says how to rebuild the inputs; ``constants`` belong in the inputs file, too."""

    text: str
    specs: tuple[InputSpec, ...]
    constants: dict[str, torch.Tensor]


def graph_file(module: GraphModule, title: str, file: str, inputs: str, outputs: str, imports: str = "") -> GraphFile:
    """The Python file of one graph. ``file``, ``inputs`` and ``outputs`` are the names in its folder.

    Args:
        imports: lines that the graph's operators need, such as the import that registers them.
    """
    specs = input_specs(module.graph)
    needed: dict[str, str] = {"torch": _IMPORTS["torch"]}
    constants: dict[str, torch.Tensor] = {}
    classes = "".join(_classes(module, "Graph", needed, constants))
    root = "Graph()" if not constants else f"Graph.with_constants(__file__, {inputs!r})"
    text = _HEADER.format(
        title=printable(title),
        file=file,
        inputs=inputs,
        outputs=outputs,
        imports="\n".join([*sorted(set(needed.values())), *([imports] if imports else [])]),
        specs="".join(f"    {spec!r},\n" for spec in specs),
        classes=classes,
        root=root,
    )
    return GraphFile(text, specs, constants)


def input_specs(graph: Graph) -> tuple[InputSpec, ...]:
    """What :func:`moe_compile.dump_run.rebuild_inputs` needs to know, from the graph's annotations."""
    return tuple(_spec(node) for node in graph.nodes if node.op == "placeholder")


def _spec(node: Node) -> InputSpec:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = (tuple(size_hint(size) for size in sizes) for sizes in (value.shape, value.stride()))
        return (node.name, dtype, shape, stride, str(value.device))
    return (node.name, size_hint(value) if isinstance(value, int | float | torch.SymInt | torch.SymFloat) else None)


def _classes(module: GraphModule, name: str, needed: dict[str, str], constants: dict[str, torch.Tensor]) -> list[str]:
    """The source of a graph's class, after those of the graphs that it calls."""
    found: list[str] = []
    attributes = []
    for target in dict.fromkeys(
        str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")
    ):
        value: Any = module
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            inner = f"{name}_{re.sub(r'[^0-9a-zA-Z_]', '_', target)}"
            found += _classes(value, inner, needed, constants)
            attributes.append(f"    {target} = {inner}()\n")
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            constants[target] = value
    code = module.graph.python_code("self")
    for key, value in code.globals.items():
        needed[key] = _IMPORTS.get(key) or _import_line(key, value)
    body = "".join(f"{line}\n" for line in _body(module.graph, code.src))
    constructor = _CONSTRUCTOR if constants and name == "Graph" else ""
    found.append(f"\n\nclass {name}:\n{''.join(attributes)}{constructor}{body}\n    __call__ = forward\n")
    return found


_CONSTRUCTOR = '''    @classmethod
    def with_constants(cls, file, inputs):
        """Tensors that are part of the graph, recorded beside its inputs."""
        from pathlib import Path

        from safetensors.torch import load_file

        graph = cls()
        for name, value in load_file(Path(file).with_name(inputs)).items():
            if name.startswith("constant:"):
                setattr(graph, name.removeprefix("constant:"), value)
        return graph

'''


def _import_line(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return (
            f"import {value.__name__}" if value.__name__.split(".")[0] == name else f"import {value.__name__} as {name}"
        )
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and qualified and "<" not in qualified and "." not in qualified:
        return f"from {module} import {qualified} as {name}"
    return f"{name} = None  # {printable(repr(type(value)))} that cannot be imported"


_ASSIGNED = re.compile(r"^    (\w+)(?: : [^=]+)? = ")
_FREED = re.compile(r";  (?:\w+ = )+None$")


def _body(graph: Graph, source: str) -> Iterator[str]:
    """The method ``forward``: a line for each node, the layer's name above its nodes, the shape behind each."""
    nodes = {node.name: node for node in graph.nodes}
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    yield "    def forward("
    yield "        self,"
    for node in arguments:
        yield f"        {node.name},{_comment(shape_text(node))}"
    yield "    ):"
    layer = ""
    lines = iter(source.splitlines())
    for line in lines:
        if line.startswith("def "):
            break
    for line in lines:
        assigned = _ASSIGNED.match(line)
        assigned_node = nodes.get(assigned[1]) if assigned else None
        if assigned_node is not None and assigned_node.op == "placeholder":
            continue  # its name as an argument, where that differs
        if assigned_node is not None and assigned_node.meta.get("nn_module_stack"):
            here = module_path(assigned_node)
            if here != layer:
                layer = here
                yield ""
                yield f"        # {printable(layer)}"
        if line.strip():
            shape = _comment(shape_text(assigned_node)) if assigned_node is not None else ""
            yield f"    {_FREED.sub('', line)}{shape}"


def _comment(text: str) -> str:
    return f"  # {text}" if text else ""


def shape_text(node: Node) -> str:
    """``bf16[16, 64]``; an empty string if the node makes no tensor."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    short = dtype.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{short}[{', '.join(map(str, value.shape))}]"


def node_lines(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """The code lines of some nodes, in graph order, as :func:`graph_file` writes them."""
    wanted = {node.name for node in nodes}
    found = []
    for line in graph.python_code("self").src.splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned and assigned[1] in wanted:
            found.append(_FREED.sub("", line).strip())
    return found


def printable(text: str) -> str:
    """Names come from other people's models: no line break or control character of theirs reaches a file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text).replace('"""', "'''")
