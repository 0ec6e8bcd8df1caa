"""Server versions: update counts sent by servers and seen by clients.

A restarted server may have lost its last updates, so an update count alone is ambiguous. Servers
also send a lifetime number, which grows with each restart.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.update_counts import KINDS

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


def by_kind(losses: Mapping[str, int]) -> Counter[str]:
    """Returns the lost updates by kind of those by server, run and kind."""
    counts: Counter[str] = Counter()
    for key, count in losses.items():
        counts[key.rpartition("/")[2]] += count
    return counts


@dataclasses.dataclass
class _SeenRun:
    """Numbers of updates by `KINDS` of one run of a server: restored at its start, and newest."""

    restored: list[int]
    newest: list[int]


class SeenVersions:
    """Per-thread versions of all servers, and the updates that each run of a server lost.

    A push counts as one update, and the pushes of a synchronous update as one together.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._runs: dict[int, dict[int, _SeenRun]] = {}  # by server and lifetime

    @property
    def losses(self) -> dict[str, int]:
        """Lost updates by "server/lifetime/kind": seen in a run, but not restored by the next.

        Clients see different updates last, so the truth of a run is the largest number of all
        clients. Sums over several runs cannot be compared that way.
        """
        losses: dict[str, int] = {}
        with self._lock:
            for server, runs in self._runs.items():
                for lifetime, after in itertools.pairwise(sorted(runs)):
                    pairs = zip(KINDS, runs[lifetime].newest, runs[after].restored, strict=True)
                    for kind, newest, restored in pairs:
                        if newest > restored:
                            losses[f"{server}/{lifetime}/{kind}"] = newest - restored
        return losses

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
            runs = self._runs.setdefault(server, {})
            run = runs.get(seen[0])
            if run is None:
                restored = [*fields.get("restored_applied", (0,) * len(KINDS))]
                restored[-1] = fields.get("restored_version") or 0
                run = runs[seen[0]] = _SeenRun(restored, counts)
            if counts != run.newest:
                run.newest = [*map(max, run.newest, counts)]

    def note_own_update(self, server: int) -> None:
        """Makes values just before this thread's last update as new as it; no other came between.

        A step that sends several updates would be late by its own ones.
        """
        own = self._own()
        lifetime, version = own[server, None]
        before = lifetime, version - 1
        own.update({key: own[server, None] for key, seen in own.items() if seen == before})

    def note_oldest(self, name: str, runs: Mapping[int, tuple[int, int]]) -> None:
        """Records the run and version of each server's values of a variable, perhaps cached."""
        self._own().update({(server, name): run for server, run in runs.items()})

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
