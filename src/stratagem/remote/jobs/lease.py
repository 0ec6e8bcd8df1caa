"""How a job learns that its client lives, by the port for jobs alone.

The client uploads small packages, one after the other, with a number in their name. The job asks
whether the next one is there. Ray forgets packages that were asked for, some minutes later.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from stratagem.errors import UnavailableError
from stratagem.servers.closing import Closing

__all__ = ["Lease", "LeaseWatch"]

# The client renews so often within the limit.
_RENEWALS = 6
_CLOSING_S = 2.0


class _Packages(Protocol):
    def has_package(self, name: str) -> bool: ...

    def upload(self, name: str, content: bytes) -> None: ...


class Lease(Closing):
    """Tells a job that this process lives, until it is closed.

    Args:
        jobs: of the cluster.
        nonce: of the job.
        limit_s: after which time without a sign the job ends.
    """

    def __init__(self, jobs: _Packages, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._pause_s = limit_s / _RENEWALS
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="client lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._is_closed.set()
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _renew(self) -> None:
        number = 1
        while not self._is_closed.is_set():
            try:
                self._jobs.upload(_name(self._nonce, number), b"-")
            except (UnavailableError, PermissionError):
                pass  # it is tried again, and whoever follows the log says so
            else:
                number += 1
            self._is_closed.wait(self._pause_s)


class LeaseWatch:
    """Looks whether the client of this job lives.

    Args:
        jobs: of the cluster.
        nonce: of the job.
        limit_s: after which time without a sign it does not.
    """

    def __init__(self, jobs: _Packages, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._limit_s = limit_s
        self._number = 1
        self._seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Returns whether nothing was heard of the client for the limit."""
        try:
            while self._jobs.has_package(_name(self._nonce, self._number)):
                self._number += 1
                self._seen_s = time.monotonic()
        except UnavailableError:
            self._seen_s = time.monotonic()  # nobody can be heard: that is not the client's fault
        return time.monotonic() - self._seen_s > self._limit_s

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks."""
        return self._limit_s / _RENEWALS


def _name(nonce: str, number: int) -> str:
    return f"stratagem_client_{nonce}_{number}.zip"
