"""Versions of servers: their numbers of updates, as sent and as seen by clients.

A server that is started again may have lost its last updates, so that a number alone says little.
It tells which time it runs, too: of two such numbers the larger is the later.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from stratagem.parameter_server.transport.wire import Message

__all__ = ["Lifetime", "SeenVersions"]

_NEVER = (0, 0)


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One run of a server, from its start to its end.

    Args:
        number: larger than those of its runs before.
        restored_version: how many updates are in what it began with; None if it began with nothing.
    """

    number: int
    restored_version: int | None = None

    def fields(self, version: int) -> dict[str, Any]:
        """Returns what an answer tells of it.

        Args:
            version: how many updates it has made.
        """
        return {
            "version": version,
            "lifetime": self.number,
            "restored_version": self.restored_version,
        }

    def version_of(self, fields: Mapping[str, Any]) -> int:
        """Returns the version, in this run, of the values that a request was computed from.

        Args:
            fields: of the request: the version and the run of the server that a client has seen.
        """
        version = int(fields["version"])
        if fields.get("lifetime", self.number) == self.number:
            return version
        return min(version, self.restored_version or 0)


class SeenVersions:
    """Versions of all servers that a client has seen, per thread.

    `num_lost` counts updates that servers had made and lost when they were started again.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._newest: dict[int, tuple[int, int]] = {}
        self.num_lost = 0

    def note(self, server: int, answer: Message, names: Iterable[str] = ()) -> None:
        """Notes what an answer tells.

        Args:
            server: whose answer it is.
            answer: the answer.
            names: of the variables whose values came with it.
        """
        fields = answer.fields
        seen = int(fields["lifetime"]), int(fields["version"])
        own = self._own()
        own.update(dict.fromkeys([(server, name) for name in names], seen))
        own[server, None] = seen
        with self._lock:
            newest = self._newest.setdefault(server, seen)
            if seen[0] > newest[0]:  # not so an answer of the former run that came late
                self.num_lost += max(0, newest[1] - (fields["restored_version"] or 0))
            self._newest[server] = max(newest, seen)

    def of(self, server: int, names: Iterable[str]) -> dict[str, int]:
        """Returns the fields of a request that tell how old the values of this thread are.

        Args:
            server: who is told.
            names: of the variables whose gradients were computed; the oldest counts.
        """
        own = self._own()
        last = own.get((server, None), _NEVER)
        lifetime, version = min((own.get((server, name), last) for name in names), default=last)
        return {"lifetime": lifetime, "version": version}

    def _own(self) -> dict[tuple[int, str | None], tuple[int, int]]:
        own = getattr(self._local, "versions", None)
        if own is None:
            own = self._local.versions = {}
        return own
