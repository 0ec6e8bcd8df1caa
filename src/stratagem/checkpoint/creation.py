"""Moments at which variables come into being: after a method, or with a first value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from stratagem.execution.tracing.created_variables import is_uninitialized

__all__ = [
    "call_after",
    "infers_shapes",
    "is_in_step",
    "layers_of",
    "set_keras",
    "when_initialized",
]


class _Slot:
    """Functions on Keras's private names, set by the Keras layer."""

    def __init__(self) -> None:
        self.flatten_layers: Callable[[Any], list[Any]] = lambda layer: [layer]
        self.stateless_scope: Callable[[], Any] = lambda: None
        self.infers_shapes: Callable[[], bool] = lambda: False


_slot = _Slot()


def set_keras(
    flatten_layers: Callable[[Any], list[Any]],
    stateless_scope: Callable[[], Any],
    infers_shapes: Callable[[], bool],
) -> None:
    """Sets the functions that list a layer's sublayers and find scopes without assignments."""
    _slot.flatten_layers, _slot.stateless_scope = flatten_layers, stateless_scope
    _slot.infers_shapes = infers_shapes


def infers_shapes() -> bool:
    """True while Keras calls a model to build its layers; Keras ignores errors then."""
    return _slot.infers_shapes()


def layers_of(layer: Any) -> list[Any]:
    """Returns a layer and every layer inside it."""
    return _slot.flatten_layers(layer)


def is_in_step() -> bool:
    """True while code is traced or called for shapes, so that an assignment would be traced."""
    return _slot.stateless_scope() is not None or isinstance(jnp.zeros(()), Tracer)


def call_after(owner: Any, method: str, action: Callable[[], bool]) -> None:
    """Calls an action after each call of a method of one object, until it returns True."""
    # Not by assignment: a layer that is built lets nothing be set.
    vars(owner)[method] = _Followed(owner, method, action)


class _Followed:
    """A method of an object, with an action after it; a copy of the object has the method alone."""

    def __init__(self, owner: Any, method: str, action: Callable[[], bool]) -> None:
        functools.update_wrapper(self, getattr(owner, method))
        self._members, self._method, self._action = vars(owner), method, action
        self._original: Any = getattr(owner, method)
        self._had_own = method in self._members
        self._is_done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original(*args, **kwargs)
        if not self._is_done and self._action():
            self._end()
        return result

    def __reduce__(self) -> Any:
        return _itself, (self._original,)

    def _end(self) -> None:
        self._is_done, self._action = True, bool
        if self._members.get(self._method) is not self:
            return  # something else follows it
        self._members.pop(self._method)
        if self._had_own:
            self._members[self._method] = self._original


def _itself(method: Any) -> Any:
    return method


def when_initialized(variables: Iterable[Any], action: Callable[[], None]) -> None:
    """Calls an action as soon as each of some variables has its first value; now, if all have."""
    waiting = {id(one): one for one in variables if is_uninitialized(one)}
    if not waiting:
        action()
        return
    for variable in list(waiting.values()):
        _after_first_value(variable, functools.partial(_count, waiting, variable, action))


def _count(waiting: dict[int, Any], variable: Any, action: Callable[[], None]) -> None:
    waiting.pop(id(variable), None)
    if not waiting:
        action()


def _after_first_value(variable: Any, then: Callable[[], None]) -> None:
    def got() -> bool:
        if is_uninitialized(variable):
            return False
        then()
        return True

    call_after(variable, "_deferred_initialize", got)
