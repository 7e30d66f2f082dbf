"""``FACTORY`` arguments: from ``file.py:function`` or ``package.module:function`` to a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_compile import hf_factory
from moe_compile.errors import FactoryError, ModelFailed, nearest
from moe_compile.quiet import one_line

RETURNS = "a torch.nn.Module, (model, args), (model, kwargs) or (model, args, kwargs)"


@dataclass(frozen=True)
class ModelCall:
    """A model and the arguments of one call, ``model(*args, **kwargs)``."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def load_model_call(factory: str, random_weights: bool = False) -> ModelCall:
    """Import the factory, call it without arguments and understand what it returns.

    A model alone is called with its ``dummy_inputs`` (every Hugging Face model has them), moved to its device.
    A folder with a Hugging Face ``config.json``, or the name of a model in the local cache, is a factory, too: the
    model with its weights, or with ``random_weights`` one of few layers.

    Raises:
        FactoryError: the file, module or function does not exist, or the function returns something else.
        ModelFailed: the module raised when imported, or the function when called.
    """
    if hf_factory.is_hf_name(factory):
        build = hf_factory.random_model if random_weights else hf_factory.stored_model
        return _model_call(factory, build(factory))
    if random_weights:
        raise FactoryError(f"--random-weights is for a Hugging Face folder or name, but FACTORY is {factory!r}")
    function = load_function(factory)
    try:
        returned = function()
    except Exception as error:  # the user's code may raise anything
        raise ModelFailed(f"factory {factory!r} raised {one_line(error)}") from error
    return _model_call(factory, returned)


def load_function(factory: str) -> Callable[[], Any]:
    """The function that ``factory`` names. Raises FactoryError or ModelFailed."""
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise FactoryError(
            f"FACTORY {factory!r} is not of the form file.py:function or package.module:function"
            + (f"; add ':' and the function's name to {factory!r}" if Path(factory).is_file() else "")
        )
    is_file = where.endswith(".py") or "/" in where
    module = _import_file(Path(where)) if is_file else _import_module(where)
    function = getattr(module, name, None)
    if function is None:
        names = sorted(key for key, value in vars(module).items() if _is_own_function(module, value))
        choices = f" Functions in it are {', '.join(names)}." if names else " It defines no function."
        raise FactoryError(f"FACTORY {factory!r}: {where} has no function {name!r}.{choices}" + nearest(name, names))
    if not callable(function):
        raise FactoryError(f"FACTORY {factory!r}: {name} is not a function but {_kind(function)}")
    found: Callable[[], Any] = function
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise FactoryError(f"FACTORY: there is no file {str(path)!r}." + nearest(path.name, beside))
    name = f"factory_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FactoryError(f"FACTORY: file {str(path)!r} is not Python source: its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    # As `python file.py` does: the file's neighbours can be imported, and dataclasses find their module.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise ModelFailed(f"importing {str(path)!r} raised {one_line(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    # As `python -m` does: modules in the current folder can be imported.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise FactoryError(
                f"FACTORY {name!r}: there is no module {error.name!r} in the current folder or on sys.path "
                "(a file is written file.py:function)"
            ) from None
        raise ModelFailed(f"importing {name!r} raised {one_line(error)}") from error
    except Exception as error:  # the user's code may raise anything
        raise ModelFailed(f"importing {name!r} raised {one_line(error)}") from error


def _model_call(factory: str, returned: object) -> ModelCall:
    match returned:
        case torch.nn.Module():
            return ModelCall(returned, kwargs=_dummy_inputs(factory, returned))
        case (torch.nn.Module() as model, Mapping() as kwargs):
            return ModelCall(model, kwargs=kwargs)
        case (torch.nn.Module() as model, tuple() | list() as args):
            return ModelCall(model, tuple(args))
        case (torch.nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return ModelCall(model, tuple(args), kwargs)
    raise FactoryError(f"factory {factory!r} returned {_kind(returned)}, expected {RETURNS}")


def _dummy_inputs(factory: str, model: torch.nn.Module) -> dict[str, Any]:
    try:
        inputs = getattr(model, "dummy_inputs", None)
    except NotImplementedError:
        inputs = None
    if not isinstance(inputs, Mapping):
        raise FactoryError(
            f"factory {factory!r} returned a {type(model).__name__} alone, and it has no dummy_inputs to call it with: "
            "return (model, kwargs) or (model, args, kwargs)"
        )
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _is_own_function(module: ModuleType, value: object) -> bool:
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module.__name__


def _kind(value: object) -> str:
    """``None``, ``int``, ``(int, dict)``."""
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"({', '.join(_kind(part) for part in value)})"
    return type(value).__name__
