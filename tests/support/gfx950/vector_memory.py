"""Global, flat and buffer instructions, loads into LDS and atomics included."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950.formats import F16, F32, MASK32, MASK64, U8, U16, U32, U64, bf16_bits, merge_half, sign_extend, signed32
from gfx950.operands import field, scalar_source
from gfx950.wave import M0, EmuError, Execute, Wave

# name of the data: (bytes, sign extended)
_MEMORY_SIZES = {
    "UBYTE": (1, False),
    "SBYTE": (1, True),
    "BYTE": (1, False),
    "USHORT": (2, False),
    "SSHORT": (2, True),
    "SHORT": (2, False),
    "DWORD": (4, False),
    "DWORDX2": (8, False),
    "DWORDX3": (12, False),
    "DWORDX4": (16, False),
}
_NO_LANES = np.empty(0, int)


def _parse_size(key: str) -> tuple[int, bool, int | None]:
    """(bytes, sign extended, half of the register or None) of an access such as DWORDX4 or SHORT_D16_HI."""
    size_name, d16, suffix = key.partition("_D16")
    if size_name not in _MEMORY_SIZES:
        raise EmuError(f"memory access {key}")
    return *_MEMORY_SIZES[size_name], int(suffix == "_HI") if d16 else None


def to_registers(data: np.ndarray, sext: bool) -> np.ndarray:
    """(n, bytes) uint8 to (n, registers) uint32."""
    count = data.shape[1]
    if count >= 4:
        return np.ascontiguousarray(data).view(U32)
    value = data[:, 0].astype(U32)
    if count == 2:
        value |= data[:, 1].astype(U32) << U32(8)
    if sext:
        value = np.where(value >> U32(8 * count - 1) & U32(1), value | U32(MASK32 << (8 * count) & MASK32), value)
    return value.astype(U32)[:, None]


def from_registers(registers: np.ndarray, first: int, lanes: np.ndarray, count: int, half: int | None) -> np.ndarray:
    """The (n, count) bytes to store; half 1 takes 1 or 2 bytes from the upper half of the register."""
    data = np.ascontiguousarray(registers[first : first + max(count // 4, 1), lanes].T).view(U8)
    start = 2 if half else 0
    return data[:, start : start + count] if count < 4 else data


def write_lanes(registers: np.ndarray, first: int, lanes: np.ndarray, values: np.ndarray, half: int | None) -> None:
    """Write (n, registers) values to some lanes; half 0 or 1 keeps the other half of the one register."""
    for i in range(values.shape[1]):
        if half is None:
            registers[first + i, lanes] = values[:, i]
        else:
            registers[first, lanes] = merge_half(registers[first, lanes], values[:, 0] & U32(0xFFFF), half)


# what a memory instruction does with its addresses: f(wave, addresses, lanes, lanes out of the range of a buffer)
_Access = Callable[[Wave, np.ndarray, np.ndarray, np.ndarray], None]


def _load_access(key: str, reg: int, accumulator: int) -> _Access:
    count, sext, half = _parse_size(key)
    used = max(count // 4, 1)

    def execute(w: Wave, address: np.ndarray, lanes: np.ndarray, outside: np.ndarray) -> None:
        registers = w.registers(accumulator)
        values = to_registers(w.machine.memory.load(address, count, lanes), sext) if len(lanes) else None

        def land() -> None:
            if values is not None:
                write_lanes(registers, reg, lanes, values, half)
            if len(outside):
                registers[reg : reg + used, outside] = 0

        if w.machine.strict and len(lanes) and half is None:
            registers[reg : reg + used, lanes] = w.machine.POISON
        w.machine.vector_memory_operation(w, land)

    return execute


def _load_to_lds_access(key: str, offset: int) -> _Access:
    """Data goes to LDS at M0 + offset + lane * size."""
    count, _, half = _parse_size(key)
    if half is not None:
        raise EmuError(f"load to LDS of {key}")

    def execute(w: Wave, address: np.ndarray, lanes: np.ndarray, outside: np.ndarray) -> None:
        base = (w.sgpr[M0] & 0x3FFFF) + offset
        data = w.machine.memory.load(address, count, lanes, "load to LDS") if len(lanes) else None

        def land() -> None:
            if data is not None:
                w.machine.lds_write(w, base + lanes * count, data)
            if len(outside):
                w.machine.lds_write(w, base + outside * count, np.zeros((len(outside), count), U8))

        w.machine.vector_memory_operation(w, land)

    return execute


def _store_access(key: str, reg: int, accumulator: int) -> _Access:
    count, _, half = _parse_size(key)

    def execute(w: Wave, address: np.ndarray, lanes: np.ndarray, outside: np.ndarray) -> None:
        if len(lanes):
            w.machine.memory.store(address, from_registers(w.registers(accumulator), reg, lanes, count, half), lanes)
        w.machine.vector_memory_operation(w, lambda: None)

    return execute


def _add_f32(old: int, new: int) -> int:
    return int((np.array([old], U32).view(F32) + np.array([new], U32).view(F32)).view(U32)[0])


def _add_pairs(old: int, new: int, add: Callable[[np.ndarray], int]) -> int:
    return sum(add(np.array([old >> shift & 0xFFFF, new >> shift & 0xFFFF], U16)) << shift for shift in (0, 16))


def _add_bf16(codes: np.ndarray) -> int:
    values = (codes.astype(U32) << U32(16)).view(F32)
    return int(bf16_bits(values[:1] + values[1:])[0])


def _add_f16(codes: np.ndarray) -> int:
    values = codes.view(F16)
    return int((values[:1] + values[1:]).view(U16)[0])


# old value in memory, value of the lane -> new value; CMPSWAP is apart
_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "ADD_F32": _add_f32,
    "PK_ADD_BF16": lambda old, new: _add_pairs(old, new, _add_bf16),
    "PK_ADD_F16": lambda old, new: _add_pairs(old, new, _add_f16),
    "ADD": operator.add,
    "ADD_X2": operator.add,
    "SWAP": lambda old, new: new,
    "SWAP_X2": lambda old, new: new,
    "UMAX": max,
    "SMAX": lambda old, new: max(signed32(old), signed32(new)),
    "OR": operator.or_,
}


def _atomic_access(name: str, reg: int, returns: int, result_reg: int) -> _Access:
    """Read, modify, write, one lane after the other."""
    op = name.split("ATOMIC_")[1]
    if op not in _ATOMICS and op != "CMPSWAP":
        raise EmuError(name)
    count = 8 if op.endswith("_X2") else 4
    dtype, mask = (U64, MASK64) if count == 8 else (U32, MASK32)

    def execute(w: Wave, address: np.ndarray, lanes: np.ndarray, outside: np.ndarray) -> None:
        for one_address, lane in zip(address, lanes, strict=True):
            where, who = np.array([one_address], U64), np.array([lane])
            old = int(w.machine.memory.load(where, count, who, "atomic").copy().reshape(-1).view(dtype)[0])
            new = int(w.vgpr[reg, lane])
            if op == "CMPSWAP":
                value = new if old == int(w.vgpr[reg + 1, lane]) else old
            else:
                value = _ATOMICS[op](old, new | int(w.vgpr[reg + 1, lane]) << 32 if count == 8 else new)
            w.machine.memory.store(where, np.array([value & mask], dtype).view(U8)[None], who, "atomic")
            if returns:
                w.vgpr[result_reg, lane] = old & MASK32
                if count == 8:
                    w.vgpr[result_reg + 1, lane] = old >> 32
        w.machine.vector_memory_operation(w, lambda: None)

    return execute


def build_global(inst: Any, name: str) -> Execute:
    """GLOBAL and FLAT instructions."""
    encoding = type(inst).__name__
    if encoding == "SCRATCH":
        raise EmuError("scratch memory")
    vaddr, data, vdst = field(inst, "addr"), field(inst, "data"), field(inst, "vdst")
    accumulator = field(inst, "acc", 0)
    saddr = field(inst, "saddr") if encoding == "GLOBAL" else 127
    offset = sign_extend(field(inst, "offset"), 13) if encoding == "GLOBAL" else field(inst, "offset")
    action = name.split("_", 1)[1]
    if action.startswith("LOAD_LDS_"):
        access = _load_to_lds_access(action.removeprefix("LOAD_LDS_"), offset)
    elif action.startswith("LOAD_"):
        access = _load_access(action.removeprefix("LOAD_"), vdst, accumulator)
    elif action.startswith("STORE_"):
        access = _store_access(action.removeprefix("STORE_"), data, accumulator)
    elif action.startswith("ATOMIC_") and not accumulator:
        access = _atomic_access(name, data, field(inst, "sc0"), vdst)
    else:
        raise EmuError(name)

    def execute(w: Wave) -> None:
        lanes = w.active_lanes()
        if saddr < M0:
            address = U64(w.read_s64(saddr)) + w.vgpr[vaddr, lanes].astype(U64)
        else:
            address = w.vgpr[vaddr, lanes].astype(U64) | (w.vgpr[vaddr + 1, lanes].astype(U64) << U64(32))
        access(w, address + U64(offset & MASK64), lanes, _NO_LANES)

    return execute


def build_buffer(inst: Any, name: str) -> Execute:
    """MUBUF instructions, through a buffer descriptor in four scalar registers."""
    kind, _, key = name.removeprefix("BUFFER_").partition("_")
    if kind in ("WBL2", "INV"):
        return lambda w: None
    vdata, vaddr, descriptor = field(inst, "vdata"), field(inst, "vaddr"), field(inst, "srsrc") * 4
    offset, scalar_offset = field(inst, "offset"), scalar_source(inst, field(inst, "soffset"))
    offset_enabled, index_enabled = field(inst, "offen"), field(inst, "idxen")
    accumulator = field(inst, "acc", 0)
    if kind == "ATOMIC" and not accumulator:
        access = _atomic_access(name, vdata, field(inst, "sc0"), vdata)
        count = 8 if key.endswith("_X2") else 4
    elif kind == "LOAD":
        access = _load_to_lds_access(key, offset) if field(inst, "lds") else _load_access(key, vdata, accumulator)
        count = _parse_size(key)[0]
    elif kind == "STORE":
        access = _store_access(key, vdata, accumulator)
        count = _parse_size(key)[0]
    else:
        raise EmuError(name)

    def execute(w: Wave) -> None:
        word0, word1, records = w.sgpr[descriptor : descriptor + 3]
        base, stride = word0 | (word1 & 0xFFFF) << 32, word1 >> 16 & 0x3FFF
        lanes, scalar = w.active_lanes(), U64(scalar_offset(w))
        offsets = np.full(len(lanes), offset, U64)
        if offset_enabled:
            offsets = offsets + w.vgpr[vaddr + (1 if index_enabled else 0), lanes].astype(U64)
        if index_enabled:
            offsets = offsets + w.vgpr[vaddr, lanes].astype(U64) * U64(stride)
        offsets &= U64(MASK32)
        inside = np.ones(len(lanes), bool) if stride else offsets + scalar + U64(count) <= U64(records)
        access(w, (U64(base) + offsets + scalar)[inside], lanes[inside], lanes[~inside])

    return execute
