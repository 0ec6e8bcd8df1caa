"""Identity of functions, and the warning about steps that are compiled again and again."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import reprlib
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.execution.tracing.arguments import Leaf, Static
from stratagem.execution.tracing.lost_changes import name_of
from stratagem.logs import warn_on_one_worker

# Differences between the arguments of two calls that need different programs.


class ArgumentKinds(NamedTuple):
    """Structure of `(args, kwargs)`, and what each leaf contributes to the program."""

    structure: Any
    kinds: tuple[Leaf, ...]


def differences(before: ArgumentKinds, after: ArgumentKinds) -> list[str]:
    """Returns one line per differing argument, as "args[0]: float32[4] -> float32[3]"."""
    if before.structure != after.structure:
        return [f"arguments: {_tree_text(before)} -> {_tree_text(after)}"]
    pairs = zip(before.kinds, after.kinds, _names(after.structure), strict=True)
    return [f"{name}: {_change(old, new)}" for old, new, name in pairs if old != new]


def _names(structure: Any) -> list[str]:
    """Returns the name of each leaf as an expression, such as "args[0]['x']"."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
    return [
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])  # pyright: ignore[reportAttributeAccessIssue]
        for path in paths
    ]


def _tree_text(arguments: ArgumentKinds) -> str:
    texts = map(_text, arguments.kinds)
    return reprlib.repr([*map(": ".join, zip(_names(arguments.structure), texts, strict=True))])


def _change(before: Leaf, after: Leaf) -> str:
    old, new = _text(before), _text(after)
    if old != new:
        return f"{old} -> {new}"
    if before.static is not None:
        return f"another object, {new}"
    pairs = zip(_traits(before), _traits(after), strict=True)
    return f"{old}: " + ", ".join(f"{one} -> {other}" for one, other in pairs if one != other)


def _traits(kind: Leaf) -> list[str]:
    """Returns what `_text` leaves out of an array."""
    return [
        "Python number" if kind.is_weak else "array",
        "per replica" if kind.split else "shared",
        "all rows" if kind.lengths is None else f"rows {kind.lengths}",
    ]


def _text(kind: Leaf) -> str:
    if kind.static is not None:
        return reprlib.repr(kind.static.value)
    sizes = ",".join(map(str, kind.shape or ()))
    return f"{kind.dtype}[{sizes}]"


_NUM_BEFORE_WARNING = 3
_NUM_KINDS_BEFORE_WARNING = 6
_MAX_PLACES = 1_000


@dataclasses.dataclass
class Usage:
    """Use of one program; outlives the program, which is freed with its function."""

    is_reused: bool = False  # True after its first call


class Recompilations:
    """Programs per function and kinds of arguments, with the reason for each."""

    def __init__(self) -> None:
        self._counts: collections.OrderedDict[Any, int] = collections.OrderedDict()
        self._states: dict[Any, dict[str, Any]] = {}
        self._usages: dict[Any, Usage] = {}
        self._kinds: collections.OrderedDict[Any, dict[ArgumentKinds, Usage]]
        self._kinds = collections.OrderedDict()
        self._warned: set[Any] = set()

    def note(self, fn: object, arguments: ArgumentKinds, usage: Usage) -> str:
        """Records a new program and returns the reason for it.

        Warns if the program is the third in a row for the same arguments, or the sixth for others,
        that was used only once.
        """
        inner = fn.func if isinstance(fn, functools.partial) else fn
        inner = getattr(inner, "__func__", inner)
        changed: list[str] = []
        if isinstance(inner, types.FunctionType):
            changed = self._note_state(inner, hash(arguments), usage)
        code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
        place = code or type(inner)
        known = self._kinds.setdefault(place, {})
        if arguments in known:
            return f"a new function: {_state_text(changed)}"
        reason = _nearest(known, arguments)
        known[arguments] = usage
        latest = [*known.values()][-_NUM_KINDS_BEFORE_WARNING:]
        is_wasted = len(latest) == _NUM_KINDS_BEFORE_WARNING and not any(
            one.is_reused for one in latest
        )
        if is_wasted and place not in self._warned:
            self._warned.add(place)
            message = _kinds_message(_place(inner, code), reason)
            warn_on_one_worker(message, RuntimeWarning, stacklevel=2)
        while len(self._kinds) > _MAX_PLACES:
            oldest, _ = self._kinds.popitem(last=False)
            self._warned.discard(oldest)
        return reason

    def _note_state(self, fn: types.FunctionType, kinds_hash: int, usage: Usage) -> list[str]:
        """Returns the names of values in the function that differ from those of the last one."""
        place = fn.__code__, kinds_hash
        last = self._usages.get(place)
        count = 1 if last is None or last.is_reused else self._counts[place] + 1
        self._counts[place] = count
        self._usages[place] = usage
        state = state_by_name(fn)
        before = self._states.get(place, {})
        self._states[place] = state
        while len(self._counts) > _MAX_PLACES:
            oldest, _ = self._counts.popitem(last=False)
            del self._states[oldest], self._usages[oldest]
        changed = [name for name in state if state[name] is None or state[name] != before.get(name)]
        if count == _NUM_BEFORE_WARNING:
            warn_on_one_worker(_message(fn, count, changed), RuntimeWarning, stacklevel=3)
        return changed


def _nearest(known: Iterable[ArgumentKinds], arguments: ArgumentKinds) -> str:
    """Returns the differences from the known arguments that differ least."""
    candidates = [differences(one, arguments) for one in reversed([*known])]  # the latest first
    return "; ".join(min(candidates, key=len)) if candidates else "first call"


def _state_text(changed: list[str]) -> str:
    return f"the values of {changed} in it differ" if changed else "its state differs"


def _message(fn: types.FunctionType, count: int, changed: list[str]) -> str:
    return explain(
        f"{_place(fn, fn.__code__)} was compiled "
        f"{count} times for arguments of the same kinds: each call passed a new function, and "
        f"{_state_text(changed)}.",
        expected="one function that is compiled once.",
        fix="define it once, outside the loop, and pass the changing values as arguments.",
        code="SG401",
    )


def _kinds_message(place: str, reason: str) -> str:
    return explain(
        f"{place} was compiled for {_NUM_KINDS_BEFORE_WARNING} kinds of arguments in a row, "
        f"each used once. The last time: {reason}.",
        expected="few shapes, dtypes and static values, because each kind is compiled.",
        fix="pad arrays to a few sizes, and pass numbers instead of flags and strings; "
        "sg.explain_recompiles() lists all.",
        code="SG414",
    )


def _place(fn: Any, code: types.CodeType | None) -> str:
    return name_of(fn) + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


# Function keys: a step that is defined anew for each call shares a program while it is the same.
#
# It is the same if its code, its defaults and all that it refers to are: the values of its closure,
# the globals that it names, and what the user's own functions and objects there refer to in turn.
# Objects of libraries count by identity, and layers also by the variables that they train: another
# attribute of one is seen when a step is traced, as in `fit`. A function with a value that cannot
# be compared is only the same as itself, as for `jax.jit`.


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
    attributes: Any = state if isinstance(state, tuple) else (state,)  # and those in slots
    return [kind, *(part for some in attributes for part in _flat(some or {}))]


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for item in mapping.items() for part in item]


def _referred(fn: types.FunctionType) -> dict[str, Any]:
    """Returns what a function refers to by name: globals, names of the user's modules, closure."""
    names = _global_names(fn.__code__)
    found = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    for name, value in [*found.items()]:
        if isinstance(value, types.ModuleType) and not _is_of_library(value):
            found |= {f"{name}.{one}": vars(value)[one] for one in names & vars(value).keys()}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return dict(sorted(found.items()))


def _global_names(code: types.CodeType) -> set[str]:
    """Returns the names that code and its inner functions look up."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_global_names, inner))


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
