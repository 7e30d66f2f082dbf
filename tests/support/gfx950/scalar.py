"""Scalar ALU instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gfx950.formats import MASK32, MASK64, sign_extend, signed32
from gfx950.operands import field, literal, scalar_source
from gfx950.vector_flags import COMPARE
from gfx950.wave import EXEC, EmuError, Execute, Wave

# name: (bits of the result, function(wave, a, b) -> (result, new SCC or None)); the result is cut to its width later
SOP2: dict[str, tuple[int, Callable[[Wave, int, int], tuple[int, int | None]]]] = {
    "S_ADD_U32": (32, lambda w, a, b: (a + b, (a + b) >> 32)),
    "S_SUB_U32": (32, lambda w, a, b: (a - b, int(a < b))),
    "S_ADDC_U32": (32, lambda w, a, b: (a + b + w.scc, (a + b + w.scc) >> 32)),
    "S_SUBB_U32": (32, lambda w, a, b: (a - b - w.scc, int(a < b + w.scc))),
    "S_ADD_I32": (32, lambda w, a, b: _signed_overflow(signed32(a) + signed32(b))),
    "S_SUB_I32": (32, lambda w, a, b: _signed_overflow(signed32(a) - signed32(b))),
    "S_MUL_I32": (32, lambda w, a, b: (a * b, None)),
    "S_MUL_HI_U32": (32, lambda w, a, b: ((a * b) >> 32, None)),
    "S_MUL_HI_I32": (32, lambda w, a, b: ((signed32(a) * signed32(b)) >> 32, None)),
    "S_MIN_I32": (32, lambda w, a, b: (min(signed32(a), signed32(b)), int(signed32(a) < signed32(b)))),
    "S_MAX_I32": (32, lambda w, a, b: (max(signed32(a), signed32(b)), int(signed32(a) > signed32(b)))),
    "S_MIN_U32": (32, lambda w, a, b: (min(a, b), int(a < b))),
    "S_MAX_U32": (32, lambda w, a, b: (max(a, b), int(a > b))),
    "S_CSELECT_B32": (32, lambda w, a, b: (a if w.scc else b, None)),
    "S_CSELECT_B64": (64, lambda w, a, b: (a if w.scc else b, None)),
    "S_BFM_B32": (32, lambda w, a, b: (((1 << (a & 31)) - 1) << (b & 31), None)),
    "S_PACK_LL_B32_B16": (32, lambda w, a, b: ((a & 0xFFFF) | (b & 0xFFFF) << 16, None)),
}


def _signed_overflow(exact: int) -> tuple[int, int]:
    return exact, int(exact != signed32(exact))


def _extract_unsigned(a: int, b: int, bits: int) -> int:
    return (a >> (b & (bits - 1))) & ((1 << (b >> 16 & 127)) - 1)


def _extract_signed(a: int, b: int, bits: int) -> int:
    width = min(b >> 16 & 127, bits)
    return sign_extend(a >> (b & (bits - 1)), width) if width else 0


# name without its width: function(a, b, bits); SCC says that the result is not zero
_SOP2_NONZERO: dict[str, Callable[[int, int, int], int]] = {
    "S_AND_B": lambda a, b, bits: a & b,
    "S_OR_B": lambda a, b, bits: a | b,
    "S_XOR_B": lambda a, b, bits: a ^ b,
    "S_ANDN2_B": lambda a, b, bits: a & ~b,
    "S_ORN2_B": lambda a, b, bits: a | ~b,
    "S_NAND_B": lambda a, b, bits: ~(a & b),
    "S_NOR_B": lambda a, b, bits: ~(a | b),
    "S_XNOR_B": lambda a, b, bits: ~(a ^ b),
    "S_LSHL_B": lambda a, b, bits: a << (b & (bits - 1)),
    "S_LSHR_B": lambda a, b, bits: a >> (b & (bits - 1)),
    "S_ASHR_I": lambda a, b, bits: sign_extend(a, bits) >> (b & (bits - 1)),
    "S_BFE_U": _extract_unsigned,
    "S_BFE_I": _extract_signed,
}
_SECOND_SOURCE_IS_32BIT = ("S_LSHL_B64", "S_LSHR_B64", "S_ASHR_I64", "S_BFE_U64", "S_BFE_I64")


def _nonzero_scc(function: Callable[[int, int, int], int], bits: int) -> Callable[[Wave, int, int], tuple[int, int]]:
    def operation(w: Wave, a: int, b: int) -> tuple[int, int]:
        result = function(a, b, bits) & ((1 << bits) - 1)
        return result, int(result != 0)

    return operation


def _shift_add(shift: int) -> Callable[[Wave, int, int], tuple[int, int]]:
    return lambda w, a, b: ((a << shift) + b, int((a << shift) + b > MASK32))


SOP2.update({f"{name}{bits}": (bits, _nonzero_scc(f, bits)) for name, f in _SOP2_NONZERO.items() for bits in (32, 64)})
SOP2.update({f"S_LSHL{shift}_ADD_U32": (32, _shift_add(shift)) for shift in (1, 2, 3, 4)})


def scalar_writer(reg: int, bits: int) -> Callable[[Wave, int], None]:
    """How to write a scalar result."""

    def write32(w: Wave, value: int) -> None:
        w.sgpr[reg] = value & MASK32

    return write32 if bits == 32 else lambda w, value: w.write_s64(reg, value)


def build_sop2(inst: Any, name: str) -> Execute:
    """Scalar operations on two sources."""
    if name not in SOP2:
        raise EmuError(name)
    bits, function = SOP2[name]
    a = scalar_source(inst, field(inst, "ssrc0"), bits)
    b = scalar_source(inst, field(inst, "ssrc1"), 32 if name in _SECOND_SOURCE_IS_32BIT else bits)
    write = scalar_writer(field(inst, "sdst"), bits)

    def execute(w: Wave) -> None:
        result, scc = function(w, a(w), b(w))
        write(w, result)
        if scc is not None:
            w.scc = scc

    return execute


_SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "S_AND_SAVEEXEC_B64": lambda source, mask: source & mask,
    "S_OR_SAVEEXEC_B64": lambda source, mask: source | mask,
    "S_XOR_SAVEEXEC_B64": lambda source, mask: source ^ mask,
    "S_ANDN2_SAVEEXEC_B64": lambda source, mask: source & ~mask,
    "S_ANDN1_SAVEEXEC_B64": lambda source, mask: ~source & mask,
    "S_ORN2_SAVEEXEC_B64": lambda source, mask: source | ~mask,
}
# name: (function of the source, whether SCC says that the result is not zero)
_SOP1: dict[str, tuple[Callable[[int], int], bool]] = {
    "S_MOV_B32": (lambda a: a, False),
    "S_MOV_B64": (lambda a: a, False),
    "S_NOT_B32": (lambda a: ~a & MASK32, True),
    "S_NOT_B64": (lambda a: ~a & MASK64, True),
    "S_ABS_I32": (lambda a: abs(signed32(a)) & MASK32, True),
    "S_BCNT1_I32_B32": (int.bit_count, True),
    "S_BCNT1_I32_B64": (int.bit_count, True),
    "S_FF1_I32_B32": (lambda a: (a & -a).bit_length() - 1, False),  # -1 if there is no 1
    "S_FF1_I32_B64": (lambda a: (a & -a).bit_length() - 1, False),
    "S_FLBIT_I32_B32": (lambda a: 32 - a.bit_length() if a else -1, False),
    "S_BREV_B32": (lambda a: int(f"{a:032b}"[::-1], 2), False),
    "S_SEXT_I32_I8": (lambda a: sign_extend(a, 8), False),
    "S_SEXT_I32_I16": (lambda a: sign_extend(a, 16), False),
}


def build_sop1(inst: Any, name: str) -> Execute:
    """Scalar operations on one source."""
    dst, bits = field(inst, "sdst"), 64 if name.endswith("64") else 32
    if name.startswith("S_BITSET"):
        bit_index, value = scalar_source(inst, field(inst, "ssrc0")), name.startswith("S_BITSET1")
        read, write = scalar_source(inst, dst, bits), scalar_writer(dst, bits)

        def execute_bitset(w: Wave) -> None:
            bit = 1 << (bit_index(w) & (bits - 1))
            write(w, read(w) | bit if value else read(w) & ~bit)

        return execute_bitset
    source = scalar_source(inst, field(inst, "ssrc0"), bits)
    if name in _SAVE_EXEC:
        combine = _SAVE_EXEC[name]

        def execute_save(w: Wave) -> None:
            value, mask = source(w), w.read_s64(EXEC)
            w.write_s64(dst, mask)
            result = combine(value, mask) & MASK64
            w.write_s64(EXEC, result)
            w.scc = int(result != 0)

        return execute_save
    if name == "S_GETPC_B64":
        return lambda w: w.write_s64(dst, w.pc)
    if name == "S_SETPC_B64":

        def execute_jump(w: Wave) -> None:
            w.pc = source(w)

        return execute_jump
    if name.startswith("S_CMOV_B"):
        write_if = scalar_writer(dst, bits)
        return lambda w: write_if(w, source(w)) if w.scc else None
    if name not in _SOP1:
        raise EmuError(name)
    function, sets_scc = _SOP1[name]
    write = scalar_writer(dst, 32 if "_I32_B" in name else bits)

    def execute(w: Wave) -> None:
        result = function(source(w))
        write(w, result)
        if sets_scc:
            w.scc = int(result != 0)

    return execute


def build_sopc(inst: Any, name: str) -> Execute:
    """Scalar compares: only SCC is written."""
    bits = 64 if name.endswith("64") else 32
    a, b = (scalar_source(inst, field(inst, f"ssrc{i}"), bits) for i in range(2))
    _, opcode, *rest = name.split("_")
    if opcode in ("BITCMP0", "BITCMP1"):
        wanted = int(opcode[-1])

        def execute_bit(w: Wave) -> None:
            w.scc = int((a(w) >> (b(w) & 31) & 1) == wanted)

        return execute_bit
    if opcode != "CMP":
        raise EmuError(name)
    compare, is_signed = COMPARE[rest[0]], rest[1] == "I32"

    def execute(w: Wave) -> None:
        x, y = a(w), b(w)
        w.scc = int(compare(signed32(x), signed32(y)) if is_signed else compare(x, y))

    return execute


def build_sopk(inst: Any, name: str) -> Execute:
    """Scalar operations with a 16-bit constant."""
    dst, constant = field(inst, "sdst"), field(inst, "simm16")
    signed = sign_extend(constant, 16)
    if name.startswith("S_CMPK_"):
        _, _, condition, kind = name.split("_")
        compare = COMPARE[condition]

        def execute_compare(w: Wave) -> None:
            value = w.sgpr[dst]
            w.scc = int(compare(signed32(value), signed) if kind == "I32" else compare(value, constant))

        return execute_compare
    if "REG_" in name:
        return _build_mode_register(inst, name, dst, constant)

    def execute_move(w: Wave) -> None:
        w.sgpr[dst] = signed & MASK32

    def execute_conditional_move(w: Wave) -> None:
        if w.scc:
            w.sgpr[dst] = signed & MASK32

    def execute_add(w: Wave) -> None:
        total, w.scc = _signed_overflow(signed32(w.sgpr[dst]) + signed)
        w.sgpr[dst] = total & MASK32

    def execute_multiply(w: Wave) -> None:
        w.sgpr[dst] = (signed32(w.sgpr[dst]) * signed) & MASK32

    known = {
        "S_MOVK_I32": execute_move,
        "S_CMOVK_I32": execute_conditional_move,
        "S_ADDK_I32": execute_add,
        "S_MULK_I32": execute_multiply,
    }
    if name not in known:
        raise EmuError(name)
    return known[name]


def _build_mode_register(inst: Any, name: str, reg: int, constant: int) -> Execute:
    """S_SETREG and S_GETREG; only the MODE register is kept, others are ignored and read as 0."""
    is_mode, offset, size = constant & 63 == 1, constant >> 6 & 31, (constant >> 11) + 1
    mask = ((1 << size) - 1) << offset
    immediate = literal(inst) if "IMM32" in name else None

    def execute_set(w: Wave) -> None:
        value = w.sgpr[reg] if immediate is None else immediate
        if is_mode:
            w.mode = (w.mode & ~mask) | (value << offset & mask)

    def execute_get(w: Wave) -> None:
        w.sgpr[reg] = (w.mode & mask) >> offset if is_mode else 0

    known = {
        "S_SETREG_B32": execute_set,
        "S_SETREG_IMM32_B32": execute_set,
        "S_GETREG_B32": execute_get,
    }
    if name not in known:
        raise EmuError(name)
    return known[name]
