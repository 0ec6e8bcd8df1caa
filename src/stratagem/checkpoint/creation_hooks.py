"""Hooks that run an action when Keras creates or initializes variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.core import Tracer

from stratagem.execution.tracing.created_variables import is_uninitialized

if TYPE_CHECKING:
    import keras

    from stratagem.strategies.base.strategy import Strategy


class _KerasHooks:
    """Functions that use Keras's private names, set by the `keras` package."""

    def __init__(self) -> None:
        self.flatten_layers: Callable[[Any], list[Any]] = lambda layer: [layer]
        self.stateless_scope: Callable[[], Any] = lambda: None
        self.infers_shapes: Callable[[], bool] = lambda: False


_hooks = _KerasHooks()


def set_keras(
    flatten_layers: Callable[[Any], list[Any]],
    stateless_scope: Callable[[], Any],
    infers_shapes: Callable[[], bool],
) -> None:
    """Sets functions that list sublayers, return the stateless scope, detect shape inference."""
    _hooks.flatten_layers, _hooks.stateless_scope = flatten_layers, stateless_scope
    _hooks.infers_shapes = infers_shapes


def infers_shapes() -> bool:
    """True while Keras calls a model to build its layers; Keras ignores errors then."""
    return _hooks.infers_shapes()


def layers_of(layer: keras.layers.Layer) -> list[Any]:
    """Returns a layer and every layer inside it."""
    return _hooks.flatten_layers(layer)


def is_in_step() -> bool:
    """True while code is traced or called for shapes, when an assignment would be traced."""
    return _hooks.stateless_scope() is not None or isinstance(jnp.zeros(()), Tracer)


def call_after(owner: Strategy, method: str, action: Callable[[], bool]) -> None:
    """Runs an action after each call of one object's method, until the action returns True."""
    # Not by assignment: a built layer forbids it.
    vars(owner)[method] = _MethodWithCallback(owner, method, action)


class _MethodWithCallback:
    """A bound method followed by an action; copies of the object get only the method."""

    def __init__(self, owner: Strategy, method: str, action: Callable[[], bool]) -> None:
        functools.update_wrapper(self, getattr(owner, method))
        self._members, self._method, self._action = vars(owner), method, action
        self._original: Any = getattr(owner, method)
        self._had_own = method in self._members
        self._is_done = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self._original(*args, **kwargs)
        if not self._is_done and self._action():
            self._remove()
        return result

    def __reduce__(self) -> Any:
        return _identity, (self._original,)

    def _remove(self) -> None:
        self._is_done, self._action = True, bool
        if self._members.get(self._method) is not self:
            return  # replaced by another hook
        self._members.pop(self._method)
        if self._had_own:
            self._members[self._method] = self._original


def _identity(method: object) -> Any:
    return method


def when_initialized(variables: Iterable[Any], action: Callable[[], None]) -> None:
    """Runs an action once all variables have their first value; immediately if they do."""
    waiting = {id(one): one for one in variables if is_uninitialized(one)}
    if not waiting:
        action()
        return
    for variable in list(waiting.values()):
        _after_first_value(variable, functools.partial(_finish_one, waiting, variable, action))


def _finish_one(
    waiting: dict[int, Any], variable: keras.Variable, action: Callable[[], None]
) -> None:
    waiting.pop(id(variable), None)
    if not waiting:
        action()


def _after_first_value(variable: keras.Variable, then: Callable[[], None]) -> None:
    def is_initialized() -> bool:
        if is_uninitialized(variable):
            return False
        then()
        return True

    call_after(variable, "_deferred_initialize", is_initialized)
