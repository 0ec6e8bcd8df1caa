"""Retries after transient failures of workers to reach a server."""

from __future__ import annotations

import threading
import warnings

from stratagem.errors import PSUnavailableError
from stratagem.messages import explain


class TransientFailures:
    """Counts consecutive functions, over all workers, that could not reach a server.

    More than `limit` of them in a row are an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()

    def note_success(self) -> None:
        """Resets the count after a function has succeeded."""
        with self._lock:
            self._count = 0

    def is_tolerated(self, error: BaseException) -> bool:
        """Returns True, with a warning, if the failed function should be retried."""
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
                f"Failure {count} of at most {self._limit} in a row; retrying the function: "
                f"{reason}",
                expected="parameter servers that all workers can reach.",
                fix="check the network and the servers if this warning repeats.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )
        return True
