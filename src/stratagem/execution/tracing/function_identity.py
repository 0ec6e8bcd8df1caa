"""Function keys: a step redefined for each call shares a program if code and state are equal."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import enum
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from stratagem.execution.tracing.arguments import Static

# Comparing a larger state takes longer than it saves.
_MAX_OBJECTS = 50_000
_MAX_ARRAY_BYTES = 1 << 20
_FLAGS = ("trainable", "synchronization", "aggregation")
_OF_KERAS = (
    keras.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
)


class _UnknownError(Exception):
    """The state cannot be compared."""


class FunctionKeys:
    """Cache of function keys, which lasts as long as the functions."""

    def __init__(self) -> None:
        self._keys: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def key(self, fn: Callable[..., Any]) -> Any:
        """Returns a hashable key; functions with equal keys trace to the same program."""
        if dataclasses.is_dataclass(fn):  # our own wrapper of the user's step
            fields = [getattr(fn, field.name) for field in dataclasses.fields(fn)]
            return type(fn), tuple(self.key(one) if callable(one) else one for one in fields)
        try:
            return self._keys[fn]
        except (KeyError, TypeError):
            pass
        key = function_key(fn)
        if key is None:
            return _itself(fn)
        with contextlib.suppress(TypeError):  # not weakly referenceable
            self._keys[fn] = key
        return key


def function_key(fn: object) -> Any:
    """Returns a key of a function's code and state, kept alive by it; None if not comparable."""
    if not isinstance(fn, types.FunctionType | functools.partial):
        return None
    state = _state_or_none(fn)
    return None if state is None else _HashedState((state, _settings()))


def state_by_name(fn: types.FunctionType) -> dict[str, Any]:
    """Returns the state of each name that a function refers to; None if not comparable."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    values: dict[str, Any] = dict(cells)
    for name in _names(fn.__code__) & fn.__globals__.keys():
        values[name] = fn.__globals__[name]
    return {name: _state_or_none(value) for name, value in sorted(values.items())}


def _state_or_none(value: object) -> Any:
    try:
        return _State().of(value)
    except (_UnknownError, RecursionError):
        return None


def _settings() -> tuple[Any, ...]:
    """Returns the settings that tracing depends on, besides the function and its arguments."""
    return (
        keras.config.floatx(),
        keras.config.epsilon(),
        keras.config.image_data_format(),
        keras.config.dtype_policy().name,
    )


def _itself(fn: object) -> Any:
    try:
        hash(fn)
    except TypeError:
        return Static(fn)
    return fn


class _HashedState:
    """A state with its hash: each step looks its program up, and a state has hundreds of parts."""

    __slots__ = ("_hash", "_state")

    def __init__(self, state: tuple[Any, ...]) -> None:
        self._state = state
        self._hash = hash(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedState) and self._state == other._state

    def __hash__(self) -> int:
        return self._hash


class _Same:
    """An object compared by identity; kept alive, because its id could be reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _State:
    """One walk over everything that a function refers to."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []  # alive during the walk, so that ids are not reused

    def of(self, value: object) -> Any:
        """Returns the state of a value as a hashable structure."""
        if value is None or isinstance(value, str | bytes | bool | int | enum.Enum):
            return type(value), value
        if isinstance(value, float | complex):
            return type(value), repr(value)  # distinguishes -0.0 from 0.0
        if isinstance(value, type(NotImplemented) | type(...) | np.dtype | np.generic):
            return type(value), repr(value)
        if id(value) in self._places:
            return "again", self._places[id(value)]
        if len(self._places) >= _MAX_OBJECTS:
            raise _UnknownError
        self._places[id(value)] = len(self._places)
        self._alive.append(value)
        return type(value), self._content(value)

    def _content(self, value: object) -> Any:
        if isinstance(value, keras.Variable):  # its value is an input of the program
            return _Same(value), tuple(str(getattr(value, name, None)) for name in _FLAGS)
        if isinstance(value, jax.Array) or _is_of_library(value):
            return _Same(value)
        if isinstance(value, np.ndarray):
            return _Same(value), _array(value)
        parts = _parts(value)
        if parts is not None:
            # A step may change or return a mutable object, so an equal one is not enough.
            is_mutable = isinstance(value, list | set | dict | collections.deque)
            return _Same(value) if is_mutable else None, self._items(parts)
        return (
            self._function(value) if isinstance(value, types.FunctionType) else self._object(value)
        )

    def _items(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self.of(value) for value in values)

    def _function(self, fn: types.FunctionType) -> Any:
        names = _names(fn.__code__)
        known = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
        for name, value in [*known.items()]:
            if isinstance(value, types.ModuleType) and not _is_of_library(value):
                known |= {f"{name}.{key}": vars(value)[key] for key in names if key in vars(value)}
                del known[name]
        return (
            _Same(fn.__code__),
            self._items(fn.__defaults__ or ()),
            self._items(_flat(fn.__kwdefaults__ or {})),
            self._items(fn.__closure__ or ()),
            self._items(_flat(known)),
            self._items(_flat(vars(fn))),
        )

    def _object(self, value: object) -> Any:
        # Asked of the type: a lazy module of Keras imports its library for any attribute.
        is_iterator = hasattr(type(value), "__next__")
        if is_iterator or isinstance(value, bytearray | memoryview | array.array):
            raise _UnknownError
        if isinstance(value, type):
            return _Same(value), self._items(_flat(vars(value)))
        if _is_of_library(type(value), "stratagem") and not isinstance(value, _OF_KERAS):
            return _Same(value)  # a strategy changes with each program that it caches
        attributes = [value.__dict__] if hasattr(value, "__dict__") else []
        attributes += [getattr(value, name, None) for name in _slots(type(value))]
        return _Same(value), self.of(type(value)), self._items(attributes)


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for item in mapping.items() for part in item]


def _parts(value: object) -> list[Any] | None:
    """Returns the parts of a container, `functools.partial`, method or cell; None for others."""
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return [*value]
    if isinstance(value, dict):
        return _flat(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, None, *_flat(value.keywords)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.CellType):
        return [value.cell_contents] if _is_filled(value) else []
    return None


def _slots(kind: type) -> list[str]:
    slots: list[str] = []
    for one in kind.__mro__:
        own = vars(one).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    return [name for name in slots if not name.startswith("__")]


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code and its inner functions look up."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _array(value: np.ndarray[Any, Any]) -> Any:
    # The bytes of a subclass, such as a masked array, are not all of its state.
    is_plain = type(value) is np.ndarray
    if not is_plain or value.nbytes > _MAX_ARRAY_BYTES or value.dtype.hasobject:
        raise _UnknownError
    return value.shape, str(value.dtype), value.tobytes()


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_of_library(value: object, library: str | None = None) -> bool:
    """Returns True if a module, class or function is from an installed or a given library."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        name = value.__module__ or "builtins"
    else:
        return False
    root = name.partition(".")[0]
    return _is_library(root) if library is None else root == library


@functools.cache
def _is_library(root: str) -> bool:
    if root == "__main__" or root not in sys.modules:
        return False
    if root in sys.stdlib_module_names or root == __name__.partition(".")[0]:
        return True
    file = getattr(sys.modules[root], "__file__", None)
    return file is not None and _has_installed(_folder_of(file))


def _folder_of(file: str) -> str:
    """Returns the folder that a module or package of this file is in."""
    folder, name = os.path.split(file)
    return os.path.dirname(folder) if name.startswith("__init__.") else folder


@functools.cache
def _has_installed(folder: str) -> bool:
    """Returns True if packages are installed in a folder.

    Not only this environment's: others can be on its path, such as those of `pip --target`.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.endswith(".dist-info") for entry in entries)
    return False
