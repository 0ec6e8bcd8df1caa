"""Pickling by value with cloudpickle, and search for objects that cannot be pickled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stratagem.optional_libraries import load

__all__ = ["captured_values", "dumps", "find_unpicklable"]

_MAX_DEPTH = 8


def dumps(value: object) -> bytes:
    """Pickles an object for another machine, functions and classes of a script by value."""
    pickler = load("cloudpickle", needed_by="a function that is sent", install="stratagem[ray]")
    return pickler.dumps(value)


def find_unpicklable(parts: Mapping[str, Any], depth: int = _MAX_DEPTH) -> tuple[str, Any] | None:
    """Returns the innermost part that cannot be pickled, with its description; None without one.

    `parts` are objects by description; `depth` limits the search inside them.
    """
    for name, value in parts.items():
        try:
            dumps(value)
        except Exception:  # noqa: BLE001 - __reduce__ may raise anything
            inner = find_unpicklable(_parts_of(name, value), depth - 1) if depth else None
            return inner or (name, value)
    return None


def captured_values(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables that a callable captures, by description."""
    with contextlib.suppress(TypeError, ValueError):
        captured = inspect.getclosurevars(fn)
        both = {**captured.nonlocals, **captured.globals}
        return {f"Variable {name!r}": value for name, value in both.items()}
    return {}


def _parts_of(name: str, value: object) -> dict[str, Any]:
    if inspect.isfunction(value):
        return {f"{part} of {name}": one for part, one in captured_values(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": one for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {f"{name}[{index}]": one for index, one in enumerate(value)}
    state: Any = value.__getstate__() if hasattr(value, "__dict__") else None
    if not isinstance(state, dict) or inspect.ismodule(value):
        return {}
    return {f"{name}.{part}": one for part, one in cast("dict[str, Any]", state).items()}
