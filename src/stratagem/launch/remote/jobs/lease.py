"""Lease of a client, so that its job ends when the client is gone.

The client uploads small packages with increasing numbers in their names, and the job asks for the
next one, so only the port for jobs is needed. Ray deletes such packages after some minutes.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from stratagem.errors import UnavailableError
from stratagem.resources import Closing

# Number of renewals within the limit.
_RENEWALS = 6
_CLOSING_S = 2.0


class _Packages(Protocol):
    def has_package(self, name: str) -> bool: ...

    def upload(self, name: str, content: bytes) -> None: ...


class Lease(Closing):
    """Renews the lease of a job until it is closed; without it the job ends after `limit_s`."""

    def __init__(self, jobs: _Packages, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._pause_s = limit_s / _RENEWALS
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="client lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the renewals."""
        self._is_closed.set()
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _renew(self) -> None:
        number = 1
        while not self._is_closed.is_set():
            try:
                self._jobs.upload(_name(self._nonce, number), b"-")
            except (UnavailableError, PermissionError):
                pass  # tried again; following the log reports the error
            else:
                number += 1
            self._is_closed.wait(self._pause_s)


class LeaseWatch:
    """Checks in a job whether its client renews the lease."""

    def __init__(self, jobs: _Packages, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._limit_s = limit_s
        self._number = 1
        self._seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the lease was not renewed within the limit."""
        try:
            while self._jobs.has_package(_name(self._nonce, self._number)):
                self._number += 1
                self._seen_s = time.monotonic()
        except UnavailableError:
            self._seen_s = time.monotonic()  # no client could renew now
        return time.monotonic() - self._seen_s > self._limit_s

    @property
    def pause_s(self) -> float:
        """Seconds between two checks."""
        return self._limit_s / _RENEWALS


def _name(nonce: str, number: int) -> str:
    return f"stratagem_client_{nonce}_{number}.zip"
