"""``accelerate``: MXFP8 experts and compilation for a Hugging Face model class or one model, without changing its code.

An accelerated model differs from any other in three places, none of which is saved with it:

- the configuration that its experts read says ``experts_implementation="moe_rocm"``;
- its experts modules carry the options that were given (``moe_backend``, ``activations``);
- ``model.forward`` is an :class:`AcceleratedForward`, which compiles the class's own forward on first use.

The last one is an object in the model's ``__dict__``: it follows the model through deepcopy and pickle, looks up the
forward of the model's class at each call (so subclasses may override it), and steps aside inside of another compile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from moe_compile import hf
from moe_compile.backend import moe_rocm
from moe_compile.hf_experts import NAME, specify
from moe_compile.options import CompileOptions
from moe_compile.torch_internals import isolated_compile

logger = logging.getLogger("moe_compile.hf")

T = TypeVar("T")

# The options that an experts module needs itself; the others are for compiling.
_OF_EXPERTS = ("moe_backend", "activations")


@overload
def accelerate(cls_or_model: T, /, *, enable: bool = ..., **options: Any) -> T: ...


@overload
def accelerate(cls_or_model: None = ..., /, *, enable: bool = ..., **options: Any) -> Callable[[T], T]: ...


def accelerate(cls_or_model: Any = None, /, *, enable: bool = True, **options: Any) -> Any:
    """Run a Hugging Face model on MXFP8 experts and compile its forward with ``backend="moe_rocm"``.

    ``@accelerate`` or ``@accelerate(moe_backend="triton")`` above a model class, ``accelerate(model)`` on a model. A
    class is changed in place: every model that it makes from then on, also through ``from_pretrained`` and by
    subclasses, is accelerated. Again with other options: those hold from then on.

    Args:
        cls_or_model: a subclass or an instance of transformers' ``PreTrainedModel``, with any
            ``experts_implementation``.
        enable: False undoes it: for a class, models made from then on are plain; a model gets its experts and its
            forward back.
        options: those of the backend, such as ``moe_backend``, ``strict`` or ``mode``.

    Returns:
        The same class or model; without either, a decorator.

    Raises:
        OptionError (a ValueError): an unknown option or value.
        UnsupportedExperts (a ValueError): not a transformers model, or experts that cannot be run; for a class at the
            first call of a model.
        BackendRefused (a ValueError): an explicit ``moe_backend`` cannot run here; at the first call of a model.
        MissingPackage (an ImportError): transformers is not installed.
    """
    CompileOptions.parse(options)
    if cls_or_model is None:
        return functools.partial(_accelerate, enable=enable, options=options)
    return _accelerate(cls_or_model, enable, options)


def _accelerate(cls_or_model: Any, enable: bool, options: Mapping[str, Any]) -> Any:
    hf.require_model(cls_or_model)
    hf.register_hf_experts()
    if isinstance(cls_or_model, type):
        (_accelerate_class if enable else _restore_class)(cls_or_model, options)
    elif enable:
        _install(cls_or_model, options).prepare()
    else:
        _uninstall(cls_or_model)
    return cls_or_model


class AcceleratedForward:
    """``model.forward`` of an accelerated model: ``type(model).forward``, compiled."""

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        # Weak, so that a model is freed as soon as its last user lets go of it.
        self._model = weakref.ref(model)
        self.options = dict(options)
        self.previous: list[tuple[Any, str | None]] = []  # configurations, with what they said before
        self._prepared = False
        self._compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        forward = type(model).forward
        if torch.compiler.is_compiling():
            return forward(model, *args, **kwargs)
        if not self._prepared:
            self.prepare()
        if _cache_grows(kwargs):
            return forward(model, *args, **kwargs)
        if self._compiled is None or self._compiled[0] is not forward:
            backend = functools.partial(moe_rocm, options=self.options)
            self._compiled = (forward, isolated_compile(forward, backend))
        return self._compiled[1](model, *args, **kwargs)

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the forward of an accelerated model was called after the model was deleted")
        return model

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the class's forward, bound: transformers reads it to learn which inputs the model takes."""
        return inspect.signature(type(self.model).forward.__get__(self.model))

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Use these from the next call on."""
        if options != self.options:
            self.options, self._compiled, self._prepared = dict(options), None, False

    def route(self) -> None:
        """Point the experts at our implementation, and give them their options."""
        given = {name: value for name, value in self.options.items() if name in _OF_EXPERTS}
        for module in hf.dispatched_experts(self.model).values():
            experts: Any = module
            implementation = experts.config._experts_implementation
            if implementation != NAME:
                self.previous.append((experts.config, implementation))
                experts.config._experts_implementation_internal = NAME
            if module.__dict__.get("_moe_compile_options") != given:
                module.__dict__["_moe_compile_options"] = given
                module.__dict__.pop("_moe_compile_plan", None)

    def prepare(self) -> None:
        """Route the experts and prove all of them, so that a refusal comes before any of them runs.

        Raises:
            UnsupportedExperts (a ValueError): the first that cannot be run.
        """
        self.route()
        found = hf.dispatched_experts(self.model)
        for module in found.values():
            if not any(parameter.is_meta for parameter in module.parameters()):  # offloaded: proven when it runs
                specify(module, getattr(self.model, "dtype", torch.bfloat16))
        if not found:
            logger.warning(
                "accelerate: transformers dispatches none of the experts of %s, so 0 of its modules run %s; its "
                "forward is compiled, and moe_compile.explain(model) says what the pass found in it",
                type(self.model).__name__,
                NAME,
            )
        self._prepared = True

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "options": self.options, "previous": self.previous}

    def __setstate__(self, state: dict[str, Any]) -> None:
        hf.register_hf_experts()
        self.__init__(state["model"], state["options"])  # type: ignore[misc]
        self.previous = state["previous"]


def _cache_grows(kwargs: Mapping[str, Any]) -> bool:
    """Whether the call has a cache that grows with each token, so that each call would be compiled anew."""
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    return cache is not None and (not getattr(cache, "is_compileable", True) or type(cache).__name__ == "DynamicCache")


def _installed(model: Any) -> AcceleratedForward | None:
    """The model's accelerated forward, also behind a hook of Hugging Face's accelerate package."""
    found = (model.__dict__.get("forward"), model.__dict__.get("_old_forward"))
    return next((one for one in found if isinstance(one, AcceleratedForward)), None)


def _install(model: Any, options: Mapping[str, Any]) -> AcceleratedForward:
    forward = _installed(model)
    if forward is None:
        forward = AcceleratedForward(model, options)
        model.forward = forward
    forward.set_options(options)
    forward.route()
    return forward


def _uninstall(model: Any) -> None:
    forward = _installed(model)
    if forward is None:
        return
    if model.__dict__.get("forward") is forward:
        del model.forward
    else:
        model._old_forward = type(model).forward.__get__(model)
    for config, implementation in forward.previous:
        if config._experts_implementation == NAME:
            config._experts_implementation_internal = implementation
    for module in hf.dispatched_experts(model).values():
        module.__dict__.pop("_moe_compile_options", None)
        module.__dict__.pop("_moe_compile_plan", None)


@contextlib.contextmanager
def plain_forward(model: object) -> Iterator[None]:
    """Inside, an accelerated model has its class's forward, on experts that are ready: for whoever compiles it."""
    forward = model.__dict__.get("forward") if isinstance(model, torch.nn.Module) else None
    if not isinstance(forward, AcceleratedForward):
        yield
        return
    forward.prepare()
    original: Any = model
    del original.forward
    try:
        yield
    finally:
        original.forward = forward


@dataclass
class _ClassMark:
    """On an accelerated class: its options, and the ``__init__`` that it had itself."""

    options: dict[str, Any]
    own_init: Any


_MARK = "_moe_compile_accelerated"


def _accelerate_class(cls: Any, options: Mapping[str, Any]) -> None:
    if _MARK in cls.__dict__:
        cls.__dict__[_MARK].options = dict(options)
        return
    mark = _ClassMark(dict(options), cls.__dict__.get("__init__"))
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _install(self, mark.options)

    cls.__init__ = __init__
    setattr(cls, _MARK, mark)


def _restore_class(cls: Any, options: Mapping[str, Any]) -> None:
    mark = cls.__dict__.get(_MARK)
    if mark is None:
        return
    if mark.own_init is None:
        del cls.__init__
    else:
        cls.__init__ = mark.own_init
    delattr(cls, _MARK)
