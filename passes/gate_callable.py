"""The gate function of a live module, recognised exactly as the pass recognises one in a graph.

The module's own code is traced into a small graph and given to :func:`match_gate_function`; nothing is taken from the
names or the configuration of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.passes.expert_gemm import ExpertGemm
from moe_compile.passes.fx_utils import Unproven, aten
from moe_compile.passes.gate_function import match_gate_function
from moe_compile.passes.row_expressions import ROW
from moe_compile.passes.row_provenance import RowProvenance
from moe_compile.spec import GateFunction
from moe_compile.torch_internals import FakeTensorMode, real_tensors

# The layers of a model trace to the same graph and are searched once.
_memo: dict[Any, Any] = {}


class RecognisedGate(NamedTuple):
    """A gate function with the layout of the columns that it reads, as ``ExpertSpec`` names them."""

    gate: GateFunction
    gate_up_layout: str
    up_first: bool


def recognise(function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype = torch.float32) -> RecognisedGate:
    """Prove what ``function`` computes of the up projection's result.

    Args:
        function: (n, width) -> (n, width / 2), or (n, width) without an up projection; differentiable or not, its
            changes of float dtype are not part of what is proven.
        width: 2I, or I without an up projection.
        dtype: of the tensor that the function is traced with.

    Raises:
        Unproven: the function is none of the known ones, is not pointwise, or depends on values.
    """

    def traced(columns: Tensor, weight: Tensor) -> Tensor:
        return function(columns)

    with real_tensors(), torch.no_grad():
        # A fake mode of its own: Dynamo's would make the sizes symbolic. Without data no branch on values can be taken.
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = (torch.empty(4, width, dtype=dtype), torch.empty(1, width, 1, dtype=dtype))
        functional = torch.func.functionalize(traced)
        try:
            graph = make_fx(functional)(*inputs).graph
        except RuntimeError as error:  # a branch on values, or an operator that takes no such tensor
            raise Unproven(f"the gate function cannot be traced ({str(error).strip().splitlines()[0]})") from None
        columns, weight, *_ = graph.nodes
        with graph.inserting_after(weight):  # stands for the projection, which is never an input of the graph
            projected = graph.call_function(aten.clone.default, (columns,))
        columns.replace_all_uses_with(projected, delete_user_cb=lambda user: user is not projected)
        projected.meta = columns.meta
        (result,) = graph.output_node().args
        if not isinstance(result, Node):
            raise Unproven("the gate function returns no tensor that depends on its input")
        gemm = ExpertGemm(projected, columns, weight, False, "listed", ROW, (), "module")
        provenance = RowProvenance()
        provenance.memo = _memo
        found = match_gate_function(result, {projected: gemm}, provenance)
    return RecognisedGate(found.gate, found.gate_up_layout, found.up_first)
