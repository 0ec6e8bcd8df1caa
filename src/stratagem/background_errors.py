"""Errors of work that goes on behind training: kept until training asks, and never swallowed."""

from __future__ import annotations

import threading

__all__ = ["raise_reported", "report_error", "take_reported"]

_errors: list[Exception] = []
_lock = threading.Lock()


def report_error(error: Exception) -> None:
    """Keeps an error for the next step. Any thread may call it.

    Args:
        error: what went wrong.
    """
    with _lock:
        _errors.append(error)


def raise_reported() -> None:
    """Raises the oldest error that was reported and not raised yet; does nothing without one.

    Raises:
        Exception: as it was reported.
    """
    if not _errors:  # what every step asks takes no lock
        return
    with _lock:
        error = _errors.pop(0) if _errors else None
    if error is not None:
        raise error


def take_reported() -> list[Exception]:
    """Returns what was reported and not raised, and forgets it."""
    with _lock:
        taken = _errors[:]
        _errors.clear()
    return taken
