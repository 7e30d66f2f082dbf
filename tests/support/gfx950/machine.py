"""Runs the waves of a workgroup, from barrier to barrier, and logs LDS conflicts."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from tinygrad.renderer.amd import decode_inst

from gfx950.control import BarrierReached, ProgramEnd
from gfx950.dispatch import build
from gfx950.formats import I16, I64, LANES, U8, U32
from gfx950.program import Instruction, Program
from gfx950.wave import EXEC, EmuError, HostMemory, Wave


class Race(NamedTuple):
    """An LDS conflict between two waves without a barrier between them."""

    kind: str
    workgroup: tuple[int, int, int]
    wave: int
    pc: int  # offset in the code object of the instruction after the one that noticed
    first_byte: int
    last_byte: int
    other: int  # the wave that wrote, or the bit mask of the waves that read


class Machine:
    """Runs workgroups of one program.

    strict: vector-memory loads (to registers or LDS) land only at the s_waitcnt vmcnt that covers them; the registers
    are poisoned meanwhile.  races: log LDS bytes touched by two waves, one of them writing, between two barriers.
    trace: called before every instruction with (workgroup, wave index, offset, decoded instruction, wave).
    """

    POISON = 0xFFFFFFFF
    INSTRUCTION_LIMIT = 2_000_000  # of one wave between two barriers

    def __init__(
        self,
        program: Program,
        ranges: Iterable[tuple[int, int, str]] = (),
        lds_bytes: int = 0,
        strict: bool = False,
        races: bool = True,
        trace: Callable[..., None] | None = None,
    ) -> None:
        self.memory, self.image_base, self.lds_bytes = HostMemory(ranges), program.base, lds_bytes
        self.strict, self.log_races, self.trace = strict, races, trace
        self.executed: collections.Counter[str] = collections.Counter()  # wave-instructions per opcode
        self.race_log: list[Race] = []
        self._instructions = program.instructions
        self._reset_lds_log()

    def _reset_lds_log(self) -> None:
        size = max(self.lds_bytes, 4)
        self._writer, self._readers = np.full(size, -1, I16), np.zeros(size, I64)  # a wave, a mask of waves; per byte

    # ---- used by the instructions

    def vector_memory_operation(self, w: Wave, land: Callable[[], None]) -> None:
        """Complete an operation that vmcnt counts: now, or in strict mode when it is waited for."""
        if self.strict:
            w.pending.append(land)
        else:
            land()

    def wait_vector_memory(self, w: Wave, count: int) -> None:
        """Complete the oldest operations until no more than count are outstanding."""
        while len(w.pending) > count:
            w.pending.pop(0)()

    def _lds_index(self, address: np.ndarray, count: int) -> np.ndarray:
        address = np.asarray(address, I64)
        if len(address) and (int(address.min()) < 0 or int(address.max()) + count > self.lds_bytes):
            first, last = int(address.min()), int(address.max()) + count
            raise EmuError(f"LDS access out of range: bytes {first}..{last} of {self.lds_bytes}")
        return address[:, None] + np.arange(count)

    def lds_read(self, w: Wave, address: np.ndarray, count: int) -> np.ndarray:
        """count bytes at each address: (n, count) uint8."""
        index = self._lds_index(address, count)
        if self.log_races:
            writer = self._writer[index]
            self._log_race(w, "read after write", (writer >= 0) & (writer != w.index), index, writer)
            self._readers[index] |= 1 << w.index
        return w.lds[index]

    def lds_write(self, w: Wave, address: np.ndarray, data: np.ndarray) -> None:
        """Write (n, count) uint8 at n addresses."""
        index = self._lds_index(address, data.shape[1])
        if self.log_races:
            changes = w.lds[index] != data  # writing the value that is there already is harmless
            writer, readers = self._writer[index], self._readers[index]
            self._log_race(w, "write after write", (writer >= 0) & (writer != w.index) & changes, index, writer)
            self._log_race(w, "write after read", ((readers & ~(1 << w.index)) != 0) & changes, index, readers)
            self._writer[index] = w.index
        w.lds[index] = data

    def _log_race(self, w: Wave, kind: str, bad: np.ndarray, index: np.ndarray, other: np.ndarray) -> None:
        if bad.any():
            where, pc = index[bad], int(w.pc) - self.image_base
            self.race_log.append(
                Race(kind, w.workgroup, w.index, pc, int(where.min()), int(where.max()), int(other[bad][0]))
            )

    # ---- execution

    def _fetch(self, pc: int) -> Instruction:
        inst = None
        try:
            inst = decode_inst(ctypes.string_at(pc, 16), "cdna")
            entry = Instruction(build(inst), inst.size(), inst.op.name, inst)
        except (EmuError, KeyError, ValueError) as error:
            raise EmuError(f"pc {pc - self.image_base:#x}: {inst!r}: {type(error).__name__} {error}") from error
        self._instructions[pc] = entry
        return entry

    def _run_wave(self, w: Wave) -> bool:
        """Run up to the next barrier (True) or to the end of the program (False)."""
        instructions, executed, trace = self._instructions, self.executed, self.trace
        for _ in range(self.INSTRUCTION_LIMIT):
            pc = w.pc
            execute, size, opcode, inst = instructions.get(pc) or self._fetch(pc)
            w.pc = pc + size
            executed[opcode] += 1
            if trace:
                trace(w.workgroup, w.index, pc - self.image_base, inst, w)
            try:
                execute(w)
            except ProgramEnd:
                self.wait_vector_memory(w, 0)
                return False
            except BarrierReached:
                return True
            except EmuError as error:
                where = f"workgroup {w.workgroup} wave {w.index} pc {pc - self.image_base:#x}"
                raise EmuError(f"{where} {inst!r}: {error}") from None
        raise EmuError("instruction limit")

    def run_workgroup(
        self,
        entry: int,
        workgroup: tuple[int, int, int],
        threads: int,
        user_sgprs: Sequence[int],
        rsrc2: int,
        mode: int = 0,
        poison: bool = True,
    ) -> None:
        """Run one workgroup; its waves run one after the other from barrier to barrier.

        user_sgprs are the first scalar registers; rsrc2 (COMPUTE_PGM_RSRC2) says which workgroup numbers follow.
        poison fills registers and LDS with all-ones instead of 0.
        """
        fill = self.POISON if poison else 0
        lds = np.full(max(self.lds_bytes, 4), fill & 255, U8)
        waves = []
        for index in range(-(-threads // 64)):
            sgpr = [0xDEADBEEF if poison else 0] * 128
            initial = [*user_sgprs, *(workgroup[i] for i in range(3) if rsrc2 >> (7 + i) & 1)]
            sgpr[: len(initial)] = initial
            vgpr, agpr = np.full((256, 64), fill, U32), np.full((256, 64), fill, U32)
            vgpr[0] = index * 64 + LANES
            wave = Wave(vgpr, agpr, sgpr, lds, self, index, workgroup)
            wave.write_s64(EXEC, (1 << min(64, threads - index * 64)) - 1)
            wave.pc, wave.mode = entry, mode
            waves.append(wave)
        with np.errstate(all="ignore"):
            while waves:
                self._reset_lds_log()
                waves = [wave for wave in waves if self._run_wave(wave)]
