"""Warning about steps that are compiled again and again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import reprlib
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from stratagem.errors import explain
from stratagem.execution.tracing.arguments import Leaf
from stratagem.execution.tracing.function_identity import state_by_name
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
