"""What is sent as objects: functions and classes of a script too."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stratagem.optional_libraries import load

__all__ = ["CALL", "dump", "find_culprit", "load_pickled", "outside_of"]

CALL = "stratagem_call.pickle"
"""The file of a function with its arguments, in the folder of a program that was sent."""

_DEPTH = 8
_NEEDED = {"needed_by": "a function that is sent", "install": "stratagem[ray]"}


def dump(value: Any) -> bytes:
    """Pickles what another machine is to have.

    Args:
        value: the object.

    Raises:
        Exception: it cannot be pickled. ImportError: cloudpickle is not installed.
    """
    return load("cloudpickle", **_NEEDED).dumps(value)


def load_pickled(content: bytes) -> Any:
    """Returns what `dump` has pickled, of somebody who is known.

    Args:
        content: of `dump`.

    Raises:
        ImportError: cloudpickle is not installed.
    """
    return load("cloudpickle", **_NEEDED).loads(content)


def find_culprit(parts: Mapping[str, Any], depth: int = _DEPTH) -> tuple[str, Any] | None:
    """Finds the innermost object that cannot be pickled.

    Args:
        parts: objects by what they are called.
        depth: how far to look into them.

    Returns:
        What it is called, and the object; None where all can be.
    """
    for name, value in parts.items():
        try:
            dump(value)
        except Exception:  # noqa: BLE001 - a reduction may raise anything
            inner = find_culprit(_parts_of(name, value), depth - 1) if depth else None
            return inner or (name, value)
    return None


def outside_of(fn: Any) -> dict[str, Any]:
    """Returns what a function refers to, by what it is called in messages.

    Args:
        fn: any callable.
    """
    with contextlib.suppress(TypeError, ValueError):
        outside = inspect.getclosurevars(fn)
        both = {**outside.nonlocals, **outside.globals}
        return {f"Variable {name!r}": value for name, value in both.items()}
    return {}


def _parts_of(name: str, value: Any) -> dict[str, Any]:
    if inspect.isfunction(value):
        return {f"{part} of {name}": one for part, one in outside_of(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": one for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {f"{name}[{place}]": one for place, one in enumerate(value)}
    state: Any = value.__getstate__() if hasattr(value, "__dict__") else None
    if not isinstance(state, dict) or inspect.ismodule(value):
        return {}
    return {f"{name}.{part}": one for part, one in cast("dict[str, Any]", state).items()}
