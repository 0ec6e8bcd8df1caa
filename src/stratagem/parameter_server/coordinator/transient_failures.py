"""Servers that workers cannot reach for a moment."""

from __future__ import annotations

import threading
import warnings

from stratagem.errors import PSUnavailableError
from stratagem.messages import explain

__all__ = ["TransientFailures"]


class TransientFailures:
    """Counts functions that failed because their workers could not reach a server.

    Args:
        limit: how many there may be in a row, of all workers.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()

    def note_success(self) -> None:
        """Notes that a function has ended well: it could reach the servers."""
        with self._lock:
            self._count = 0

    def is_tolerated(self, error: BaseException) -> bool:
        """Returns True if a failed function is retried, with a warning.

        Args:
            error: why it failed.
        """
        if not isinstance(error, PSUnavailableError):
            return False
        with self._lock:
            self._count += 1
            count = self._count
        if count > self._limit:
            return False
        (reason, *_) = str(error).splitlines()
        warnings.warn(
            explain(
                f"Failure {count} of {self._limit} in a row that are tolerated: {reason}",
                expected="servers that all workers can reach.",
                fix="nothing, if it does not come again: the function is run again.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )
        return True
