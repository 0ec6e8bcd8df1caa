"""Server versions: update counts sent by servers and seen by clients.

A restarted server may have lost its last updates, so an update count alone is ambiguous. Servers
also send a lifetime number, which grows with each restart.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stratagem.parameter_server.server.update_counts import KINDS
from stratagem.parameter_server.transport.wire import Message

__all__ = ["Lifetime", "SeenVersions"]

_NEVER = (0, 0)


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One run of a server, from start to exit.

    Args:
        number: larger than in all earlier runs.
        restored_version: version restored from the journal; None if nothing was restored.
        restored_applied: restored numbers of applied updates, by `KINDS`.
    """

    number: int
    restored_version: int | None = None
    restored_applied: tuple[int, ...] = (0,) * len(KINDS)

    def fields(self, version: int, applied: Sequence[int]) -> dict[str, Any]:
        """Returns the answer fields that describe this run.

        `version` and `applied`, the numbers of updates by `KINDS`, are those of now.
        """
        fields = {"version": version, "lifetime": self.number, "applied": applied}
        if self.restored_version is None:
            return fields
        restored = {
            "restored_version": self.restored_version,
            "restored_applied": self.restored_applied,
        }
        return {**fields, **restored}

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

    `lost` counts updates lost in server restarts, by kind. A push counts as one update, and the
    pushes of a synchronous update as one together.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._newest: dict[int, tuple[int, Sequence[int]]] = {}
        self.lost: Counter[str] = Counter()

    @property
    def num_lost(self) -> int:
        """Number of lost updates of all kinds."""
        with self._lock:
            return self.lost.total()

    def note(self, server: int, answer: Message, names: Iterable[str] = ()) -> None:
        """Records the version in an answer that has the values of these variables."""
        fields = answer.fields
        seen = int(fields["lifetime"]), int(fields["version"])
        own = self._own()
        own.update(dict.fromkeys([(server, name) for name in names], seen))
        own[server, None] = seen
        counts: list[int] = fields["applied"]
        counts[-1] = seen[1]  # the version counts pushes
        with self._lock:
            lifetime, newest = self._newest.get(server, (seen[0], counts))
            if seen[0] == lifetime:
                self._newest[server] = lifetime, [*map(max, newest, counts)]
            elif seen[0] > lifetime:  # else a late answer of an earlier run
                restored = [*fields.get("restored_applied", (0,) * len(KINDS))]
                restored[-1] = fields.get("restored_version") or 0
                for kind, before, now in zip(KINDS, newest, restored, strict=True):
                    if before > now:
                        self.lost[kind] += before - now
                self._newest[server] = seen[0], counts

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
