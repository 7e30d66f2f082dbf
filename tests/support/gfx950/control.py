"""Branches, waits, barriers and the end of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gfx950.formats import sign_extend
from gfx950.operands import field
from gfx950.wave import EXEC, VCC, EmuError, Execute, Wave


class ProgramEnd(Exception):
    """The wave reached s_endpgm."""


class BarrierReached(Exception):
    """The wave reached s_barrier."""


_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "S_BRANCH": lambda w: True,
    "S_CBRANCH_SCC0": lambda w: not w.scc,
    "S_CBRANCH_SCC1": lambda w: bool(w.scc),
    "S_CBRANCH_VCCZ": lambda w: w.read_s64(VCC) == 0,
    "S_CBRANCH_VCCNZ": lambda w: w.read_s64(VCC) != 0,
    "S_CBRANCH_EXECZ": lambda w: w.read_s64(EXEC) == 0,
    "S_CBRANCH_EXECNZ": lambda w: w.read_s64(EXEC) != 0,
}
_NO_EFFECT = ("S_NOP", "S_SETPRIO", "S_SLEEP", "S_SETHALT", "S_ICACHE_INV", "S_INCPERFLEVEL", "S_DECPERFLEVEL")


def build_sopp(inst: Any, name: str) -> Execute:
    """Branches, waits, barriers and the end of the program."""
    constant = field(inst, "simm16")
    if name in _CONDITIONS:
        condition, distance = _CONDITIONS[name], 4 * sign_extend(constant, 16)

        def execute_branch(w: Wave) -> None:
            if condition(w):
                w.pc += distance

        return execute_branch
    if name == "S_WAITCNT":
        vmcnt = (constant & 15) | (constant >> 14 & 3) << 4
        return lambda w: w.machine.wait_vector_memory(w, vmcnt)
    if name in ("S_ENDPGM", "S_BARRIER"):
        signal = ProgramEnd if name == "S_ENDPGM" else BarrierReached

        def execute_stop(w: Wave) -> None:
            raise signal

        return execute_stop
    if name in _NO_EFFECT:
        return lambda w: None
    raise EmuError(name)
