"""What one wave holds: registers, EXEC, outstanding loads; and the memory of the process that it may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gfx950.formats import I64, MASK32, U8, U32, U64, mask_to_lanes

if TYPE_CHECKING:
    from gfx950.machine import Machine

VCC, M0, EXEC = 106, 124, 126  # operand numbers of scalar registers with a name
VGPR0 = 256  # operand number of the first vector register


class EmuError(RuntimeError):
    """The program does something that is not implemented, or that is an error (an access out of bounds, ...)."""


class Wave:
    """One wave: vgpr and agpr are (256, 64) uint32; sgpr holds ints by operand number, VCC, M0 and EXEC included."""

    def __init__(
        self,
        vgpr: np.ndarray,
        agpr: np.ndarray,
        sgpr: list[int],
        lds: np.ndarray,
        machine: Machine,
        index: int = 0,
        workgroup: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.vgpr, self.agpr, self.sgpr, self.lds, self.machine = vgpr, agpr, sgpr, lds, machine
        self.index, self.workgroup = index, workgroup
        self.scc = self.pc = self.mode = 0
        self.pending: list[Callable[[], None]] = []  # strict: what outstanding vector-memory operations will do
        self._exec: tuple[int, int] | None = None
        self._active, self._all_active = np.ones(64, bool), True

    def registers(self, accumulator: int | bool) -> np.ndarray:
        """The accumulator registers or the ordinary vector registers."""
        return self.agpr if accumulator else self.vgpr

    def read_s64(self, reg: int) -> int:
        """A pair of scalar registers."""
        return self.sgpr[reg] | (self.sgpr[reg + 1] << 32)

    def write_s64(self, reg: int, value: int) -> None:
        """Set a pair of scalar registers."""
        self.sgpr[reg], self.sgpr[reg + 1] = value & MASK32, (value >> 32) & MASK32

    @property
    def active(self) -> np.ndarray:
        """EXEC as 64 booleans."""
        key = (self.sgpr[EXEC], self.sgpr[EXEC + 1])
        if key != self._exec:
            self._exec = key
            self._active = mask_to_lanes(key[0] | (key[1] << 32))
            self._all_active = bool(self._active.all())
        return self._active

    def active_lanes(self) -> np.ndarray:
        """The numbers of the active lanes."""
        return np.flatnonzero(self.active)

    def write_vgpr(self, reg: int, value: np.ndarray, accumulator: bool = False) -> None:
        """Write a vector register in the active lanes."""
        active, target = self.active, self.registers(accumulator)[reg]
        if self._all_active:
            target[:] = value
        else:
            np.copyto(target, value, where=active, casting="unsafe")

    def write_vgpr64(self, reg: int, value: np.ndarray) -> None:
        """Write uint64 values to a pair of vector registers in the active lanes."""
        self.write_vgpr(reg, (value & U64(MASK32)).astype(U32))
        self.write_vgpr(reg + 1, (value >> U64(32)).astype(U32))


class HostMemory:
    """The memory of this process as one byte array; a kernel may touch only the given (low, high, name) ranges."""

    FIRST = 65536

    def __init__(self, ranges: Iterable[tuple[int, int, str]] = ()) -> None:
        everything = ctypes.c_uint8 * ((1 << 47) - self.FIRST)
        self._bytes = np.frombuffer(everything.from_address(self.FIRST), U8)
        ordered = sorted(ranges)
        self._low = np.array([low for low, _, _ in ordered], U64)
        self._high = np.array([high for _, high, _ in ordered], U64)
        self._names = [name for _, _, name in ordered]

    def _check(self, address: np.ndarray, count: int, lanes: np.ndarray, what: str) -> None:
        if not self._names:
            return
        slot = np.searchsorted(self._low, address, "right").astype(int) - 1
        bad = (slot < 0) | (address + U64(count) > self._high[np.maximum(slot, 0)])
        if bad.any():
            first = int(np.argmax(bad))
            near = max(int(slot[first]), 0)
            low, high = int(self._low[near]), int(self._high[near])
            raise EmuError(
                f"out-of-bounds {what} of {count} bytes: lane {int(lanes[first])}, {int(address[first]) - low:#x} "
                f"bytes from the start of '{self._names[near]}' (size {high - low}); {int(bad.sum())} lanes"
            )

    def _index(self, address: np.ndarray, count: int) -> np.ndarray:
        return (address.astype(I64) - self.FIRST)[:, None] + np.arange(count)

    def load(self, address: np.ndarray, count: int, lanes: np.ndarray, what: str = "load") -> np.ndarray:
        """count bytes at each uint64 address: (n, count) uint8."""
        self._check(address, count, lanes, what)
        return self._bytes[self._index(address, count)]

    def store(self, address: np.ndarray, data: np.ndarray, lanes: np.ndarray, what: str = "store") -> None:
        """Write (n, count) uint8 at n addresses."""
        self._check(address, data.shape[1], lanes, what)
        self._bytes[self._index(address, data.shape[1])] = data


Execute = Callable[[Wave], None]
Builder = Callable[[Any, str], Execute]  # (decoded instruction, opcode without its encoding)
ScalarSource = Callable[[Wave], int]
VectorSource = Callable[[Wave], np.ndarray]
