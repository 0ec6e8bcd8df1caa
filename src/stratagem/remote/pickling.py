"""What is sent as objects: functions and classes of a script too."""

from __future__ import annotations

from typing import Any

from stratagem.optional_libraries import load

__all__ = ["CALL", "dump", "load_pickled"]

CALL = "stratagem_call.pickle"
"""The file of a function with its arguments, in the folder of a program that was sent."""

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
