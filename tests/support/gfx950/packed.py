"""VOP3P: packed float32 and accumulator moves."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from gfx950.formats import F32, U32, fma32
from gfx950.matrix import build_mfma
from gfx950.operands import field, register_number, vector_source
from gfx950.wave import VGPR0, EmuError, Execute, VectorSource, Wave

_PACKED_FLOAT = {"V_PK_ADD_F32": operator.add, "V_PK_MUL_F32": operator.mul, "V_PK_FMA_F32": fma32}


def build_vop3p(inst: Any, name: str) -> Execute:
    """Matrix, accumulator-move and packed instructions."""
    if "MFMA" in name:
        return build_mfma(inst, name)
    codes, reg = [field(inst, f"src{i}") for i in range(3)], field(inst, "vdst")
    if name.startswith("V_ACCVGPR_READ"):
        accumulator = register_number(inst, "src0")
        return lambda w: w.write_vgpr(reg, w.agpr[accumulator])
    if name.startswith("V_ACCVGPR_WRITE"):
        source = vector_source(inst, codes[0])
        return lambda w: w.write_vgpr(reg, source(w), accumulator=True)
    opsel, opsel_hi = field(inst, "opsel"), field(inst, "opsel_hi", 0) | field(inst, "opsel_hi2", 0) << 2
    neg, neg_hi = field(inst, "neg", 0), field(inst, "neg_hi", 0)

    def half(i: int, select: int) -> VectorSource:
        """One 32-bit half of a 64-bit operand; a constant serves for both."""
        is_register = codes[i] >= VGPR0 or codes[i] < 128
        return vector_source(inst, codes[i] + (select >> i & 1 if is_register else 0))

    if name in _PACKED_FLOAT:
        function, count = _PACKED_FLOAT[name], 3 if "FMA" in name else 2
        low, high = ([half(i, select) for i in range(count)] for select in (opsel, opsel_hi))

        def operands(w: Wave, sources: list[VectorSource], signs: int) -> list[np.ndarray]:
            values = [source(w).view(F32) for source in sources]
            return [-x if signs >> i & 1 else x for i, x in enumerate(values)]

        def execute(w: Wave) -> None:
            first, second = function(*operands(w, low, neg)), function(*operands(w, high, neg_hi))
            w.write_vgpr(reg, first.view(U32))
            w.write_vgpr(reg + 1, second.view(U32))

        return execute
    if name == "V_PK_MOV_B32":
        a, b = half(0, opsel), half(1, opsel)

        def execute_move(w: Wave) -> None:
            first, second = a(w).copy(), b(w).copy()
            w.write_vgpr(reg, first)
            w.write_vgpr(reg + 1, second)

        return execute_move
    raise EmuError(f"packed op {name}")
