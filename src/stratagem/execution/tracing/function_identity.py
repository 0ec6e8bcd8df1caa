"""Function keys: a step that is defined anew for each call shares a program while it is the same.

It is the same if its code, its defaults and all that it refers to are: the values of its closure,
the globals that it names, and what the user's own functions and objects there refer to in turn.
Objects of libraries count by identity, and layers also by the variables that they train: another
attribute of one is seen when a step is traced, as in `fit`. A function with a value that cannot be
compared is only the same as itself, as for `jax.jit`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from stratagem.execution.tracing.arguments import Static

# Comparing a larger state takes longer than it saves.
_MAX_OBJECTS = 10_000
_MAX_ARRAY_BYTES = 1 << 20
_PLAIN = (str, bytes, int, enum.Enum, types.NoneType)
_BY_TEXT = (float, complex, np.generic, np.dtype)  # -0.0 is not 0.0
_BY_VALUE = (types.FunctionType, types.MethodType, functools.partial, tuple, frozenset)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_FLAGS = ("trainable", "synchronization", "aggregation")


class _UnknownError(Exception):
    """The state cannot be compared."""


class _Key:
    """Stands for a state, whose hundreds of parts would be hashed at each lookup of a program."""


class FunctionKeys:
    """Keys of functions, which last as long as the functions or the programs that have them."""

    def __init__(self) -> None:
        self._keys: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._of_states: weakref.WeakValueDictionary[Any, _Key] = weakref.WeakValueDictionary()

    def key(self, fn: Callable[..., Any]) -> Any:
        """Returns a hashable key; functions with equal keys trace to the same program."""
        if dataclasses.is_dataclass(fn):  # our own wrapper of the user's step
            fields = [getattr(fn, field.name) for field in dataclasses.fields(fn)]
            return type(fn), tuple(self.key(one) if callable(one) else one for one in fields)
        try:
            return self._keys[fn]
        except (KeyError, TypeError):
            pass
        if (state := function_state(fn)) is None:
            return fn if isinstance(fn, Hashable) else Static(fn)
        key = self._of_states.setdefault(state, _Key())
        with contextlib.suppress(TypeError):  # not weakly referenceable
            self._keys[fn] = key
        return key


def function_state(fn: object) -> Any:
    """Returns all that a function's program depends on; None if it cannot be compared."""
    if not isinstance(fn, types.FunctionType | functools.partial):
        return None
    config = keras.config
    settings = config.floatx(), config.epsilon(), config.image_data_format()
    state = _state_or_none(fn)
    return None if state is None else (state, *settings, config.dtype_policy().name)


def state_by_name(fn: types.FunctionType) -> dict[str, Any]:
    """Returns the state of each name that a function refers to; None if not comparable."""
    return {name: _state_or_none(value) for name, value in _referred(fn).items()}


def _state_or_none(value: object) -> Any:
    try:
        return _state(value, {})
    except (_UnknownError, RecursionError):
        return None


def _state(value: object, places: dict[int, int]) -> Any:
    """Returns the state of a value; `places` numbers the objects before it by their ids."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _BY_TEXT):
        return type(value), repr(value)
    if id(value) in places:
        return "again", places[id(value)]
    if len(places) >= _MAX_OBJECTS:
        raise _UnknownError
    places[id(value)] = len(places)
    parts = _parts(value)
    # A step may change or return a mutable object, so an equal one is not enough.
    own = None if isinstance(value, _BY_VALUE) and parts is not None else Static(value)
    return type(value), own, tuple(_state(part, places) for part in parts or ())


def _parts(value: Any) -> Iterable[Any] | None:
    """Returns what a value refers to; None if it counts by its identity alone."""
    if isinstance(value, types.FunctionType):
        if _is_of_library(value):
            return None
        defaults = [*(value.__defaults__ or ()), None, *_flat(value.__kwdefaults__ or {})]
        return [value.__code__, *defaults, *_flat(_referred(value))]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, None, *_flat(value.keywords)]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return _flat(value)
    if type(value) is np.ndarray and value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject:
        return [str(value.dtype), str(value.shape), value.tobytes()]
    if isinstance(value, keras.Variable):  # its value is an input of the program
        return [str(getattr(value, name, None)) for name in _FLAGS]
    if isinstance(value, keras.Layer):
        return value.trainable_variables
    if isinstance(value, jax.Array | types.ModuleType | types.CodeType):
        return None
    kind = value if isinstance(value, type) else type(value)
    is_of_library = _is_of_library(kind) and not isinstance(value, _NAMESPACES)
    # An iterator, or a library's array or table: its content is out of sight.
    if hasattr(kind, "__next__") or (is_of_library and hasattr(kind, "__setitem__")):
        raise _UnknownError
    if is_of_library:
        return None
    if isinstance(value, type):
        return [one for one in vars(value).values() if not isinstance(one, types.FunctionType)]
    state = object.__getstate__(value)
    attributes = state if isinstance(state, tuple) else (state,)  # and those in slots
    return [kind, *(part for some in attributes for part in _flat(some or {}))]


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for item in mapping.items() for part in item]


def _referred(fn: types.FunctionType) -> dict[str, Any]:
    """Returns what a function refers to by name: globals, names of the user's modules, closure."""
    names = _names(fn.__code__)
    found = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    for name, value in [*found.items()]:
        if isinstance(value, types.ModuleType) and not _is_of_library(value):
            found |= {f"{name}.{one}": vars(value)[one] for one in names & vars(value).keys()}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return dict(sorted(found.items()))


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code and its inner functions look up."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_of_library(value: Any) -> bool:
    """Returns True if a module, class or function is from an installed library or from Python."""
    is_module = isinstance(value, types.ModuleType)
    return _is_library((value.__name__ if is_module else value.__module__ or "").partition(".")[0])


@functools.cache
def _is_library(root: str) -> bool:
    if root in sys.stdlib_module_names or root in ("", __name__.partition(".")[0]):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != "__main__" and ("site-packages" in file or "dist-packages" in file)
