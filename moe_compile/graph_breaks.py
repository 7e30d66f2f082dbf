"""Where Dynamo broke the graph of a model: the line of code, and the hook that it stands in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import FrameSummary

import torch

# torch logs a traceback of the user's code; of a break that it has shown before, the place alone.
_PLACE = re.compile(r"in user code at (?P<file>.+):(?P<line>\d+)$", re.M)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)', re.M)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+)_at_\d+(_\d+)?$")
_CALLS_HOOK = re.compile(r"\bhook\(")


@dataclass(frozen=True)
class BreakPlace:
    """``text`` is ``model.py:12 in log_norm: print(x.sum().item())``; ``hook`` is the hook's function, if it is one."""

    line: str  # model.py:12
    text: str
    hook: str | None = None


def break_place(message: str) -> BreakPlace | None:
    """The place that one message of torch's log ``graph_breaks`` names; None if it names none."""
    frames = [
        FrameSummary(found["file"], int(found["line"]), found["function"], lookup_line=False, line=found["code"])
        for found in _FRAME.finditer(message)
    ]
    if not frames:
        place = _PLACE.search(message)
        if place is None:
            return None
        return _place(FrameSummary(place["file"], int(place["line"]), ""))
    inner = _innermost(frames)
    hook = None
    for caller, called in zip(frames, frames[1 : inner + 1], strict=False):
        if _is_torch(caller.filename) and _CALLS_HOOK.search(caller.line or "") and not _is_torch(called.filename):
            hook = _RESUMED.sub(r"\1", called.name)
    return _place(frames[inner], hook)


def break_places(messages: Sequence[str], model: object) -> list[str]:
    """One text for each line of code, in the order of the breaks, with the hook and the modules that have it."""
    found: dict[str, str] = {}
    for place in map(break_place, messages):
        if place is not None:
            hook = "" if place.hook is None else f" ({_whose(place.hook, model)})"
            found.setdefault(place.line, place.text + hook)
    return list(found.values())


def broken_at(frames: Sequence[FrameSummary]) -> str | None:
    """The place of a graph break from the user's frames, outermost first; None without frames."""
    return _place(frames[_innermost(frames)]).text if frames else None


def _whose(hook: str, model: object) -> str:
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    names = [
        name or "the model"
        for name, module in modules.items()
        if any(
            getattr(one, "__name__", None) == hook
            for one in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
    ]
    return f"the hook {hook}" + (f" of {', '.join(names)}" if names else "")


def _is_torch(file: str) -> bool:
    return "/torch/" in file.replace("\\", "/")


def _innermost(frames: Sequence[FrameSummary]) -> int:
    """The number of the innermost frame that is not torch's; of the last if all are."""
    own = (number for number in reversed(range(len(frames))) if not _is_torch(frames[number].filename))
    return next(own, len(frames) - 1)


def _place(frame: FrameSummary, hook: str | None = None) -> BreakPlace:
    file = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
    line = f"{file}:{frame.lineno}"
    function = _RESUMED.sub(r"\1", frame.name)
    return BreakPlace(line, line + (f" in {function}" if function else "") + f": {(frame.line or '').strip()}", hook)
