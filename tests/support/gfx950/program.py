"""A code object in memory with the instructions that were decoded so far, shared by all runs of it."""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gfx950.buffers import address_of
from gfx950.code_object import CodeObject
from gfx950.wave import Execute


class Instruction(NamedTuple):
    """``decoded`` is the decoder's object, for messages and traces."""

    execute: Execute
    size: int
    opcode: str
    decoded: Any


@dataclass(frozen=True)
class Program:
    """``instructions`` is filled as addresses are reached: the code may hold data, and opcodes that are never run."""

    code_object: CodeObject
    image: mmap.mmap
    instructions: dict[int, Instruction] = field(default_factory=dict)

    @functools.cached_property
    def base(self) -> int:
        """The address of the image."""
        return address_of(self.image)


@functools.lru_cache(maxsize=64)
def load_program(code_object: bytes) -> Program:
    """The program of an ELF file; the same one for the same bytes, because decoding takes longer than a short run."""
    parsed = CodeObject(code_object)
    return Program(parsed, parsed.load())
