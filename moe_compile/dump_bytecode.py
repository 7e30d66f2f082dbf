"""What Dynamo made of a frame: its bytecode as Python through depyf, and the guards that protect it."""

from __future__ import annotations

import dis
import io
import logging
import re
import threading
from collections.abc import Callable
from types import CodeType

import depyf

from moe_compile.quiet import one_line
from moe_compile.torch_internals import compile_id, guards_of, register_bytecode_hook

logger = logging.getLogger("moe_compile.dump")

# Counters and random names of this process, which would differ from dump to dump.
_UNSTABLE = (
    (re.compile(r"(__compiled_fn)_\d+(_[0-9a-f]{8}(_[0-9a-f]{4}){3}_[0-9a-f]{12})?"), r"\1"),
    (re.compile(r"(__resume_at_\d+)_\d+"), r"\1"),
    (re.compile(r"(__builtins_dict__)_\d+"), r"\1"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x..."),
    (re.compile(r"(?<![\d.])\d{13,}(?!\d)"), "<id>"),
)

_waiting: dict[object, Callable[[CodeType, CodeType], None]] = {}
_lock = threading.Lock()
_registered = False
_warned = False


def when_frame_is_done(callback: Callable[[CodeType, CodeType], None]) -> None:
    """Call ``callback(original code, Dynamo's code)`` once, when the frame that is being compiled is finished.

    Does nothing outside of a Dynamo frame (a backend can be called by hand).
    """
    global _registered
    frame = compile_id()
    if frame is None:
        return
    with _lock:
        _waiting[frame] = callback
        if not _registered:
            register_bytecode_hook(_frame_done)
            _registered = True


def _frame_done(code: CodeType, new_code: CodeType) -> None:
    with _lock:
        callback = _waiting.pop(compile_id(), None)
    if callback is not None:
        callback(code, new_code)


def decompiled(code: CodeType, new_code: CodeType) -> tuple[str, str | None]:
    """Dynamo's code as Python, or as a disassembly with the reason if depyf cannot decompile it.

    One warning a process: depyf 0.20 fails on every function with a graph break on torch 2.13.
    """
    global _warned
    try:
        return stable(depyf.decompile(new_code)), None
    except Exception as error:  # a decompiler meets bytecode it does not know in many ways; the dump goes on
        reason = f"depyf {depyf.__version__} cannot decompile {code.co_name!r}: {one_line(error)}"
    if not _warned:
        logger.warning("moe_rocm: %s. The dump holds its disassembly instead, and all the rest.", reason)
        _warned = True
    text = io.StringIO()
    dis.dis(new_code, file=text)
    return stable("".join(f"# {line}\n" for line in [reason, "", *text.getvalue().splitlines()])), reason


def guards(code: CodeType) -> str:
    """The guards of every compiled version of a function, newest first; an empty string if torch does not say."""
    return stable("\n\n".join(guards_of(code)))


def stable(text: str) -> str:
    """Without the names and addresses that differ from process to process."""
    for pattern, replacement in _UNSTABLE:
        text = pattern.sub(replacement, text)
    numbers: dict[str, int] = {}  # depyf counts its temporaries through the process
    return re.sub(r"\b__temp_(\d+)\b", lambda m: f"__temp_{numbers.setdefault(m[1], len(numbers) + 1)}", text)
