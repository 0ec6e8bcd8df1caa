"""Moves of keyed tables to other servers while training continues."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from stratagem.errors import UnavailableError, explain
from stratagem.group.transport.connection import ServerError
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import KeyLayout
from stratagem.parameter_server.server.updates import is_stored_by

# Rows that change during a round are copied in the next one. The last round has fewer bytes than
# this, or the one after so many rounds, and no update is made during it.
_MOST_LAST_BYTES = 2**22
_MOST_ROUNDS = 8
_SHARD = re.compile(r"/part_\d+(@\d+)?$")


@dataclasses.dataclass(frozen=True)
class ReshardStats:
    """Size and duration of a move of keyed tables to other servers.

    Args:
        rows: number of rows that were sent; a row that changed meanwhile counts again.
        size_bytes: size of the messages with rows.
        duration_s: time from the call to the switch to the new servers, in seconds.
        pause_s: part of it during which no update was made, in seconds.

    Example:
        >>> sg.embedding.ReshardStats(rows=1000, duration_s=0.5).pause_s
        0.0

    Source: specific to Stratagem.
    """

    rows: int = 0
    size_bytes: int = 0
    duration_s: float = 0.0
    pause_s: float = 0.0


def move_tables(
    client: ServerClient,
    layouts: Sequence[KeyLayout],
    *,
    quiesced: Callable[[], AbstractContextManager[object]],
    has_journals: bool,
) -> ReshardStats:
    """Moves tables of a client to the servers of new layouts, each of the next generation.

    Rows are copied while updates continue. Then, in `quiesced`, a context without updates by other
    processes, the rows that changed last are copied, and the first server records the new layouts:
    from then on they are valid, also after restarts if the servers have journals.

    Raises:
        UnavailableError: a server failed. The tables stay on their servers, with all updates.
    """

    def secure() -> None:
        if has_journals:
            client.journal()

    begin_s = time.monotonic()
    move = _TableMove(client, [(client.placement_of(one.name), one) for one in layouts])
    try:
        move.begin()
        move.copy()
        while move.left_bytes > _MOST_LAST_BYTES and move.num_rounds < _MOST_ROUNDS:
            move.copy()
        secure()  # not in the pause
        move.copy()
        with quiesced(), client.known.changing():
            paused_s = time.monotonic()
            move.copy()
            move.end()
            secure()
            move.place(has_journals=has_journals)
            end_s = time.monotonic()
    except (ServerError, UnavailableError) as error:
        raise move.error(str(error).partition("\n")[0]) from error
    finally:
        move.drop()
        with contextlib.suppress(ServerError, UnavailableError):  # a restart would bring them back
            secure()
    return ReshardStats(move.num_rows, move.size_bytes, end_s - begin_s, end_s - paused_s)


class _TableMove:
    """One move; `pairs` are the old and the new layout of each table."""

    def __init__(self, client: ServerClient, pairs: Sequence[tuple[Any, KeyLayout]]) -> None:
        self._client = client
        self._pairs: list[tuple[KeyLayout, KeyLayout]] = [*pairs]
        self._id = uuid.uuid4().hex
        # Of each old shard: what its last answer says, and by how much its rows were made newer.
        self._sources: dict[str, Mapping[str, Any]] = {}
        self._shifts: dict[str, int] = {}
        self._is_placed = self._is_switched = False
        self.num_rounds = self.num_rows = self.size_bytes = 0

    @property
    def left_bytes(self) -> int:
        """Size of the rows that changed while the last round copied others."""
        return sum(one["left_bytes"] for one in self._sources.values())

    def begin(self) -> None:
        """Creates the new shards, after dropping those of moves that did not end."""
        tables = {old.name for old, _ in self._pairs}
        known = {name for old, _ in self._pairs for _, name in _shards(old)}
        leftovers: dict[int, dict[str, Any]] = {}
        for server, state in self._client.describe().items():
            others = state["tables"].keys() - known
            leftovers[server] = {name: {} for name in others if _SHARD.sub("", name) in tables}
        self._client.ask_about_tables("drop_tables", leftovers)
        requests: dict[int, dict[str, Any]] = defaultdict(dict)
        for old, new in self._pairs:
            for server, name in _shards(old):
                requests[server][name] = {"spec": None}
            for part, (server, name) in enumerate(_shards(new)):
                spec = new.spec_of(part)  # no limit yet: rows to remove may be there for a while
                spec["table"] = {**spec["table"], "max_rows": None}
                requests[server][name] = {"spec": spec}
        self._client.ask_about_tables("begin_move", requests, move=self._id)

    def copy(self) -> None:
        """Copies the rows that changed since the round before, at first all of them."""
        for old, new in self._pairs:
            own = {"move": self._id, "round": self.num_rounds}
            waiting: dict[int, dict[str, Any]] = {
                server: {**own, "name": name, "first": 0} for server, name in _shards(old)
            }
            while waiting:
                requests = {server: (fields, []) for server, fields in waiting.items()}
                answers = self._client.ask_servers("copy_rows", requests)
                if old.name_of(0) not in self._shifts:
                    newest = max(one.fields["clock"] for one in answers.values())
                    for server, name in _shards(old):
                        self._shifts[name] = newest - answers[server].fields["clock"]
                for server, answer in answers.items():
                    asked = waiting.pop(server)
                    self._sources[asked["name"]] = answer.fields
                    self._send(asked["name"], new, answer.arrays, is_first=not asked["first"])
                    if (first := answer.fields["first"]) is not None:
                        waiting[server] = {**asked, "first": first}
        self.num_rounds += 1

    def _send(
        self, source: str, new: KeyLayout, arrays: Sequence[np.ndarray], *, is_first: bool
    ) -> None:
        """Sends rows of an old shard to the servers of the new layout."""
        fields = self._sources[source]
        own = {
            "move": self._id,
            "slots": fields["slots"],
            "initials": fields["initials"],
            "shift": self._shifts[source],
        }
        kinds = _kinds_of_keys(len(fields["slots"]))
        keys = {kind: arrays[kind] for kind in set(kinds)}
        shards = {kind: new.shards_of(array) for kind, array in keys.items()}
        self.num_rows += len(keys[2])
        self.size_bytes += sum(array.nbytes for array in arrays)
        messages: dict[int, Any] = {}
        for part, (server, name) in enumerate(_shards(new)):
            chosen = {kind: np.flatnonzero(one == part) for kind, one in shards.items()}
            if is_first or any(map(len, chosen.values())):
                parts = [array[chosen[kind]] for array, kind in zip(arrays, kinds, strict=True)]
                messages[server] = {**own, "name": name}, parts
        self._client.ask_servers("put_rows", messages)

    def end(self) -> None:
        """Completes the new shards: ages, counters, limits, and scalars of optimizers."""
        requests: dict[int, dict[str, Any]] = defaultdict(dict)
        new_servers: dict[int, set[str]] = defaultdict(set)
        scalars: dict[str, np.ndarray] = {}
        for old, new in self._pairs:
            clock, late = self._clock(old)
            optimizers = self._client.optimizers_of(old)
            found = self._client.scalars(old.servers[0]) if {*new.servers} - {*old.servers} else {}
            own = {
                name
                for name in found
                if any(is_stored_by(optimizer, name) for optimizer in optimizers)
            }
            scalars |= {name: found[name] for name in own}
            for part, (server, name) in enumerate(_shards(new)):
                requests[server][name] = {
                    "clock": clock,
                    "late": late,
                    "counters": self._counters(old, new, part),
                    "initials": self._sources[old.name_of(0)]["initials"],
                    "spec": new.spec_of(part),
                }
                if server not in old.servers:
                    new_servers[server] |= own
        messages = {
            server: (
                {"move": self._id, "tables": tables, "scalars": sorted(new_servers[server])},
                [scalars[name] for name in sorted(new_servers[server])],
            )
            for server, tables in requests.items()
        }
        self._client.ask_servers("end_move", messages)

    def _clock(self, old: KeyLayout) -> tuple[int, list[list[int]]]:
        """Returns the version with which the ages of rows compare, and corrections of theirs."""
        clocks = [self._sources[name]["clock"] for _, name in _shards(old)]
        newest = max(clocks)
        late = [
            newest - clock - self._shifts[name]
            for clock, (_, name) in zip(clocks, _shards(old), strict=True)
        ]
        if len({*late}) == 1:  # all servers made the same number of updates: nothing to correct
            return newest - late[0], []
        parts = zip(old.first_rows, old.rows, late, strict=True)
        return newest, [list(one) for one in parts]

    def _counters(self, old: KeyLayout, new: KeyLayout, part: int) -> dict[str, int]:
        """Returns the counters of the old shards that begin in the buckets of a new one."""
        first = new.first_rows[part]
        counters: dict[str, int] = defaultdict(int)
        for begin, (_, name) in zip(old.first_rows, _shards(old), strict=True):
            is_own = first <= begin < first + new.rows[part]
            for key, count in self._sources[name]["counters"].items():
                counters[key] += count if is_own else 0
        return counters

    def place(self, *, has_journals: bool) -> None:
        """Makes the new layouts valid, first on the first server: the one decision of the move."""
        self._is_placed = True
        layouts = {new.name: dataclasses.asdict(new) for _, new in self._pairs}
        is_recorded = False
        while not is_recorded:  # a server that restarts before its journal has them forgets them
            self._client.ask_servers("place_tables", {0: ({"layouts": layouts}, [])})
            if has_journals:
                self._client.journal([0])
            placed = self._client.placed_layouts()
            is_recorded = all(
                placed.get(name, {}).get("generation") == one["generation"]
                for name, one in layouts.items()
            )
        for _, new in self._pairs:
            self._client.switch(new)
        self._is_switched = True

    def error(self, reason: str) -> UnavailableError:
        """Returns the error of a move that failed."""
        if self._is_placed:
            return UnavailableError(
                explain(
                    f"It is not known if keyed tables were moved to other servers: {reason}",
                    expected="a first server that runs until the end of the move.",
                    fix="restart the program with the same journal_dir: it uses the layout that "
                    "the first server has recorded.",
                )
            )
        return UnavailableError(
            explain(
                f"Keyed tables were not moved to other servers: {reason}",
                expected="servers that run until the end of the move.",
                fix="call it again once all servers run. The rows stayed where they were.",
            )
        )

    def drop(self) -> None:
        """Drops the shards that are not valid, if it is known which these are.

        A server that does not answer drops them before the next move.
        """
        if self._is_placed and not self._is_switched:
            return
        requests: dict[int, dict[str, Any]] = defaultdict(dict)
        for old, new in self._pairs:
            for server, _ in _shards(old):  # to end the copies, too
                requests.setdefault(server, {})
            for server, name in _shards(old if self._is_switched else new):
                requests[server][name] = {}
        for server, own in requests.items():
            with contextlib.suppress(ServerError, UnavailableError):
                self._client.ask_about_tables("drop_tables", {server: own})


def _shards(layout: Any) -> Iterator[tuple[int, str]]:
    """Yields the server, and the name there, of each shard."""
    for part, server in enumerate(layout.servers):
        yield server, layout.name_of(part)


def _kinds_of_keys(num_slots: int) -> list[int]:
    """Returns for each array of an answer the place of the keys that it belongs to."""
    return [0, 1, 2, 2, 2, 5, 5, 5, 2, *[2] * num_slots]
