"""Errors of background work, stored until the next training step raises them."""

from __future__ import annotations

import threading

_errors: list[Exception] = []
_lock = threading.Lock()


def report_error(error: Exception) -> None:
    """Stores an error for the next step; thread-safe."""
    with _lock:
        _errors.append(error)


def raise_reported() -> None:
    """Removes the oldest stored error and raises it."""
    if not _errors:  # no lock, since every step calls this
        return
    with _lock:
        error = _errors.pop(0) if _errors else None
    if error is not None:
        raise error


def take_reported() -> list[Exception]:
    """Removes and returns all stored errors."""
    with _lock:
        taken = _errors[:]
        _errors.clear()
    return taken
