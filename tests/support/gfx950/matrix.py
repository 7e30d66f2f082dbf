"""MFMA, with and without block scales."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from gfx950.formats import BF6, BF8, E8M0, F16, F32, F64, FP4, FP6, FP8, LANES, U8, U16, U32, all_lanes
from gfx950.operands import field, register_number, scalar_source, vector_source
from gfx950.wave import VGPR0, EmuError, Execute, VectorSource, Wave

_MFMA_NAME = re.compile(
    r"V_MFMA_(SCALE_)?F32_(?P<dim>16|32)X(?P=dim)X(?P<depth>\d+)_"
    r"((?P<a>FP8|BF8)_(?=FP8|BF8))?(?P<b>FP8|BF8|BF16|F16|F32|F8F6F4)"
)
_MX_FORMATS = {0: "fp8", 1: "bf8", 2: "fp6", 3: "bf6", 4: "fp4"}  # the fields cbsz (A) and blgp (B)


def _register_bytes(registers: np.ndarray, first: int, count: int) -> np.ndarray:
    """The bytes of count registers, in order, of each lane: (64, 4 * count)."""
    return np.ascontiguousarray(registers[first : first + count].T).view(U8)


def _mx_elements(registers: np.ndarray, first: int, kind: str) -> np.ndarray:
    """The 32 elements of each lane in register order, float64."""
    if kind in ("fp8", "bf8"):
        return (FP8 if kind == "fp8" else BF8)[_register_bytes(registers, first, 8)]
    if kind == "fp4":
        pairs = _register_bytes(registers, first, 4)
        return FP4[np.stack([pairs & 15, pairs >> 4], -1).reshape(64, -1)]
    bits = np.unpackbits(_register_bytes(registers, first, 6), axis=1, bitorder="little").reshape(64, 32, 6)
    return (FP6 if kind == "fp6" else BF6)[(bits * (1 << np.arange(6))).sum(-1)]


def _mx_matrix(registers: np.ndarray, first: int, kind: str, dim: int) -> np.ndarray:
    """A, or B transposed, of an f8f6f4 MFMA: (dim, K) with K = 128 for dim 16 and 64 for dim 32.

    A group g of dim lanes holds, for fp8 and bf8, K 16g .. 16g+15 in its first four registers and K/2 + 16g .. in the
    next four; for the smaller formats 32 consecutive K.
    """
    groups = 64 // dim
    elements = _mx_elements(registers, first, kind).reshape(groups, dim, 32)
    matrix = np.empty((dim, 32 * groups))
    for g in range(groups):
        if kind in ("fp8", "bf8"):
            upper = 16 * groups + 16 * g
            matrix[:, 16 * g : 16 * g + 16], matrix[:, upper : upper + 16] = elements[g, :, :16], elements[g, :, 16:]
        else:
            matrix[:, 32 * g : 32 * g + 32] = elements[g]
    return matrix


def _float_matrix(registers: np.ndarray, first: int, kind: str, dim: int, per_lane: int) -> np.ndarray:
    """A, or B transposed, of an ordinary MFMA: (dim, K); a group of dim lanes holds per_lane consecutive K."""
    if kind in ("FP8", "BF8"):
        elements = (FP8 if kind == "FP8" else BF8)[_register_bytes(registers, first, per_lane // 4)]
    elif kind == "BF16":
        codes = _register_bytes(registers, first, per_lane // 2).view(U16).astype(U32)
        elements = (codes << U32(16)).view(F32).astype(F64)
    elif kind == "F16":
        elements = _register_bytes(registers, first, per_lane // 2).view(F16).astype(F64)
    else:
        elements = _register_bytes(registers, first, per_lane).view(F32).astype(F64)
    return elements.reshape(-1, dim, per_lane).transpose(1, 0, 2).reshape(dim, -1)


def _accumulator_rows(dim: int) -> np.ndarray:
    """The row held by accumulator register i in each lane, (registers, 64); the column is lane % dim."""
    i = np.arange(dim * dim // 64)[:, None]
    return 4 * (LANES // 16) + i if dim == 16 else 8 * (i // 4) + 4 * (LANES // 32) + i % 4


def build_mfma(inst: Any, name: str) -> Execute:
    """V_MFMA_F32_{16x16,32x32}xK and V_MFMA_SCALE_F32_*_F8F6F4: D = A @ B + C, summed in float64, rounded once."""
    parsed = _MFMA_NAME.fullmatch(name)
    if parsed is None:
        raise EmuError(name)
    dim, depth, kind_a, kind_b = int(parsed["dim"]), int(parsed["depth"]), parsed["a"], parsed["b"]
    a, b, c = register_number(inst, "src0"), register_number(inst, "src1"), field(inst, "src2") - VGPR0
    d, acc_cd, acc_ab = field(inst, "vdst"), field(inst, "acc_cd", 0), field(inst, "acc", 0)
    registers, per_lane = dim * dim // 64, depth * dim // 64
    place = (_accumulator_rows(dim), np.broadcast_to(LANES % dim, (registers, 64)))
    uniform_c = scalar_source(inst, c + VGPR0) if c < 0 else None

    def addend(w: Wave) -> np.ndarray:
        if uniform_c is not None:
            return np.full((dim, dim), np.array([uniform_c(w)], U32).view(F32)[0], F64)
        matrix = np.empty((dim, dim))
        matrix[place] = w.registers(acc_cd)[c : c + registers].view(F32)
        return matrix

    def finish(w: Wave, left: np.ndarray, right: np.ndarray) -> None:
        result = left @ right.T + addend(w)
        w.registers(acc_cd)[d : d + registers] = result[place].astype(F32).view(U32)

    if kind_b == "F8F6F4":
        kind_a, kind_b = _MX_FORMATS[field(inst, "cbsz")], _MX_FORMATS[field(inst, "blgp")]
        scale_a, scale_b = _mfma_scales(inst, dim) if type(inst).__name__ == "VOP3PX2" else (None, None)

        def execute_mx(w: Wave) -> None:
            left = _mx_matrix(w.registers(acc_ab & 1), a, kind_a, dim)
            right = _mx_matrix(w.registers(acc_ab & 2), b, kind_b, dim)
            if scale_a is not None and scale_b is not None:
                left, right = left * scale_a(w), right * scale_b(w)
            finish(w, left, right)

        return execute_mx

    def execute(w: Wave) -> None:
        left = _float_matrix(w.registers(acc_ab & 1), a, kind_a or kind_b, dim, per_lane)
        finish(w, left, _float_matrix(w.registers(acc_ab & 2), b, kind_b, dim, per_lane))

    return execute


def _mfma_scales(inst: Any, dim: int) -> tuple[VectorSource, VectorSource]:
    """The e8m0 scales of A and B, (dim, K): lane group g of the scale register holds block g of 32 K.

    op_sel and op_sel_hi choose the byte of the register: A has bit 0 of both, B has bit 1.
    """
    opsel, opsel_hi = field(inst, "opsel"), field(inst, "opsel_hi")

    def scale(i: int) -> VectorSource:
        source = vector_source(inst, field(inst, f"scale_src{i}"))
        shift = U32(8 * (opsel >> i & 1) + 16 * (opsel_hi >> i & 1))

        def read(w: Wave) -> np.ndarray:
            blocks = E8M0[(all_lanes(source(w)) >> shift) & U32(255)].reshape(-1, dim).T
            return np.repeat(blocks, 32, 1)

        return read

    return scale(0), scale(1)
