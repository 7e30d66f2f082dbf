"""Where Dynamo broke the graph of a model: the line of code, and the hook that it stands in."""

from __future__ import annotations

import linecache
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

    text: str
    hook: str | None = None


def break_place(message: str) -> BreakPlace | None:
    """The place that one message of torch's log ``graph_breaks`` names; None if it names none."""
    frames = [frame.groupdict() for frame in _FRAME.finditer(message)]
    if not frames:
        place = _PLACE.search(message)
        if place is None:
            return None
        return BreakPlace(
            _shown(place["file"], int(place["line"]), "", linecache.getline(place["file"], int(place["line"])))
        )
    inner = next((i for i in reversed(range(len(frames))) if not _is_torch(frames[i]["file"])), len(frames) - 1)
    frame = frames[inner]
    function = _RESUMED.sub(r"\1", frame["function"])
    hook = None
    for caller, called in zip(frames, frames[1 : inner + 1], strict=False):
        if _is_torch(caller["file"]) and _CALLS_HOOK.search(caller["code"]) and not _is_torch(called["file"]):
            hook = _RESUMED.sub(r"\1", called["function"])
    return BreakPlace(_shown(frame["file"], int(frame["line"]), function, frame["code"]), hook)


def break_places(messages: Sequence[str], model: object) -> list[str]:
    """One text for each line of code, in the order of the breaks, with the hook and the modules that have it."""
    found: dict[str, str] = {}
    for place in map(break_place, messages):
        if place is not None:
            hook = "" if place.hook is None else f" ({_whose(place.hook, model)})"
            found.setdefault(_line(place.text), place.text + hook)
    return list(found.values())


def _line(text: str) -> str:
    """``model.py:12``"""
    return re.split(r"(?<=\d)(?: in |: )", text, maxsplit=1)[0]


def broken_at(frames: Sequence[FrameSummary]) -> str | None:
    """The place of a graph break from the user's frames, outermost first; None without frames."""
    if not frames:
        return None
    frame = next((one for one in reversed(frames) if not _is_torch(one.filename)), frames[-1])
    return _shown(frame.filename, frame.lineno or 0, _RESUMED.sub(r"\1", frame.name), frame.line or "")


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


def _shown(file: str, line: int, function: str, code: str) -> str:
    name = file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{line}" + (f" in {function}" if function else "") + f": {code.strip()}"
