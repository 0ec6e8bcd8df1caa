"""Server versions: update counts sent by servers and seen by clients.

A restarted server may have lost its last updates, so an update count alone is ambiguous. Servers
also send a lifetime number, which grows with each restart.
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
    """One run of a server, from start to exit.

    Args:
        number: larger than in all earlier runs.
        restored_version: version restored from the journal; None if nothing was restored.
    """

    number: int
    restored_version: int | None = None

    def fields(self, version: int) -> dict[str, Any]:
        """Returns the answer fields that describe this run at a version."""
        return {
            "version": version,
            "lifetime": self.number,
            "restored_version": self.restored_version,
        }

    def version_of(self, fields: Mapping[str, Any]) -> int:
        """Returns the version, in this run, of the values behind a request.

        Values from an earlier run count as at most the restored version.
        """
        version = int(fields["version"])
        if fields.get("lifetime", self.number) == self.number:
            return version
        return min(version, self.restored_version or 0)


class SeenVersions:
    """Per-thread versions of all servers, as last seen by a client.

    `num_lost` counts updates lost in server restarts.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._newest: dict[int, tuple[int, int]] = {}
        self.num_lost = 0

    def note(self, server: int, answer: Message, names: Iterable[str] = ()) -> None:
        """Records the version in an answer that has the values of these variables."""
        fields = answer.fields
        seen = int(fields["lifetime"]), int(fields["version"])
        own = self._own()
        own.update(dict.fromkeys([(server, name) for name in names], seen))
        own[server, None] = seen
        with self._lock:
            newest = self._newest.setdefault(server, seen)
            if seen[0] > newest[0]:  # ignore a late answer of an earlier run
                self.num_lost += max(0, newest[1] - (fields["restored_version"] or 0))
            self._newest[server] = max(newest, seen)

    def of(self, server: int, names: Iterable[str]) -> dict[str, int]:
        """Returns the request fields with the version of this thread's values.

        If the variables in `names` have different versions, the oldest one counts.
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
