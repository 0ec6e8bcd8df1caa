"""Compares saved versions of keyed tables with the history of their updates.

A version has, for each server, the rows as they were between two updates: a *cut* of the history.
Clients record each update before they send it and after it was answered; an update changes rows of
all tables, on each server at once. The promises are those of docs/design/tables.md:

- No update is in a row twice, and a row's count is the number of updates in it.
- Each update of a row is in the count of the row, in `evicted_updates` or in `refused_updates`.
- A row has all updates since its creation. One that was evicted begins anew.
- A cut has all updates that were answered before the save began. Only the loss of a server may take
  updates away: none that was answered before a journal entry began, none that is older than one
  that is left, and none at all with durable updates.
- A version is read as it was saved, whatever is saved, published, compacted, rolled back or killed
  later. Changes since a version, and all rows, saved while nothing is trained, are the same.

An update is *in* a cut for certain if a row shows it, or if it was answered before the save began
and no loss explains its absence. It *may be* in it if it was sent before the save ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from validation.chaos.history import Attempt, Finding, History, Span, read_history
from validation.chaos.recording import read_records
from validation.chaos.table_states import PartState, Plan, Snapshot

__all__ = ["Operation", "Pair", "TableHistory", "check_tables", "read_table_history"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two versions that are the same: saved while nothing was trained, or after a restore."""

    numbers: tuple[int, int]
    begun_s: float
    ended_s: float
    is_restored: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the saver that succeeded, or failed with a reason."""

    kind: str
    number: int | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class TableHistory:
    """All that was recorded. `digests` are those of the snapshots when they were saved.

    `torn` has errors of files that are damaged. From `restored_s` on, rows are those of a restored
    version.
    """

    history: History
    snapshots: Sequence[Snapshot] = ()
    pairs: Sequence[Pair] = ()
    operations: Sequence[Operation] = ()
    digests: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    torn: Sequence[str] = ()
    cut_servers: frozenset[int] = frozenset()
    restored_s: float = math.inf


def read_table_history(folder: Path) -> TableHistory:
    """Reads the records and states of a run."""
    pairs: list[Pair] = []
    operations: list[tuple[float, Operation]] = []
    digests: dict[int, str] = {}
    torn: list[str] = []
    restored_s = math.inf
    for _, fields in read_records(folder / "records"):
        event, at_s = fields["event"], fields["at_s"]
        if event == "pair":
            first, second = fields["pair"]
            is_restored = fields.get("is_restored", False)
            pairs.append(Pair((first, second), fields["begun_s"], at_s, is_restored))
        elif event == "made":
            operations.append((at_s, Operation(fields["operation"], fields["number"])))
        elif event == "failed":
            operations.append((at_s, Operation(fields["operation"], None, fields["why"])))
        elif event == "state":
            digests[fields["number"]] = fields["digest"]
        elif event == "restoring":
            restored_s = min(restored_s, at_s)
        elif event == "torn":
            torn.append(fields["why"])
    paths = sorted((folder / "states").glob("*.json"), key=lambda path: int(path.stem))
    snapshots = [Snapshot.from_json(path.read_text()) for path in paths]
    in_order = [one for _, one in sorted(operations, key=lambda item: item[0])]
    history = read_history(folder / "records")
    return TableHistory(history, snapshots, pairs, in_order, digests, torn, restored_s=restored_s)


def check_tables(
    run: TableHistory, plan: Plan, *, is_durable: bool, found: Mapping[int, str] | None = None
) -> list[Finding]:
    """Returns the broken promises; `found` has the digests of the versions that are left."""
    return list(_Check(run, plan, is_durable=is_durable).findings(found or {}))


class _Check:
    def __init__(self, run: TableHistory, plan: Plan, *, is_durable: bool) -> None:
        self._run = run
        self._plan = plan
        self._is_durable = is_durable
        self._attempts: dict[int, list[Attempt]] = defaultdict(list)
        for one in run.history.updates:
            self._attempts[one.number].append(one)
        self._in: dict[tuple[int, int], set[int]] = {}

    def findings(self, found: Mapping[int, str]) -> Iterator[Finding]:
        """Yields the broken promises."""
        for text in self._run.torn:
            yield Finding("torn", text)
        for number, digest in found.items():
            if number in self._run.digests and digest != self._run.digests[number]:
                yield Finding("torn", f"version {number} is not as it was saved")
        last: dict[int, Snapshot] = {}
        trained = [one for one in self._run.snapshots if one.begun_s < self._run.restored_s]
        for snapshot in trained:
            for server in {part.server for part in snapshot.parts}:
                yield from self._wrong_cut(snapshot, server)
                if server in last:
                    yield from self._wrong_next(last[server], snapshot, server)
                last[server] = snapshot
        yield from self._wrong_pairs()

    def _wrong_cut(self, snapshot: Snapshot, server: int) -> Iterator[Finding]:
        """Compares the rows of a server with the history."""
        parts = _parts(snapshot, server)
        where = f"version {snapshot.number}, server {server}"
        for part in parts:
            for key, (made, count) in part.rows.items():
                yield from self._wrong_row(snapshot, part, key, made, count)
            if part.counters["created"] - part.counters["evicted"] != len(part.rows):
                text = f"{part.counters} and {len(part.rows)} rows"
                yield Finding("counters", f"{where}: {part.table} has {text}")
        sure, maybe = self._sure(snapshot, server), self._maybe(snapshot)
        versions = {part.version for part in parts}
        if len(versions) != 1 or not len(sure) <= min(versions) <= len(maybe):
            text = f"{versions} updates, and the history has {len(sure)} to {len(maybe)}"
            yield Finding("cut", f"{where}: {text}")
        for part in parts:
            least = sum(self._num_keys(number, part) for number in sure)
            most = sum(self._num_keys(number, part) for number in maybe)
            counted = sum(count for _, count in part.rows.values())
            counters = part.counters
            total = counted + counters["evicted_updates"] + counters["refused_updates"]
            if not least <= total <= most:
                text = f"{total} row updates, and the history has {least} to {most}"
                yield Finding("count", f"{where}: {part.table} counts {text}")

    def _wrong_row(
        self, snapshot: Snapshot, part: PartState, key: int, made: Mapping[int, int], count: int
    ) -> Iterator[Finding]:
        where = f"version {snapshot.number}: key {key} of {part.table}"
        if any(times != 1 for times in made.values()):
            yield Finding("doubled", f"{where} has {dict(made)}")
        if -1 in made:
            yield Finding("torn", f"{where} has a value that no updates explain")
        for number in made.keys() - {-1}:
            sent = [one for one in self._attempts[number] if one.begun_s < snapshot.ended_s]
            if not sent:
                yield Finding("unsent", f"{where} has {number}, which nobody sent")
        if count != len(made):
            yield Finding("count", f"{where} counts {count} updates, and has {len(made)}")
        sure = self._sure(snapshot, part.server)
        for number in self._plan.numbers.get((part.table, key), []):
            if number in made or number not in sure:
                continue
            before = [one for one in made if self._is_before(one, number)]
            if before:
                text = f"{where} has {max(before)}, and not the later {number}"
                yield Finding("lost", f"{text}, which is in the cut")
                return

    def _wrong_next(self, first: Snapshot, second: Snapshot, server: int) -> Iterator[Finding]:
        """Compares two versions of a server between which it was not lost."""
        if not self._may_revert(server, first.begun_s, second.ended_s):
            sure = self._sure(first, server)
            earlier = {part.table: part for part in _parts(first, server)}
            for part in _parts(second, server):
                before = earlier[part.table].rows
                where = f"versions {first.number} and {second.number}: "
                for key, (made, _) in part.rows.items():
                    old = before.get(key, ({}, 0))[0]
                    what = f"{where}key {key} of {part.table}"
                    if old.keys() & made.keys() and old.keys() - made.keys():
                        gone = sorted(old.keys() - made.keys())
                        yield Finding("lost", f"{what} lost {gone} and kept others")
                    if back := sorted((made.keys() - old.keys()) & sure):
                        yield Finding("back", f"{what} has {back} again")
                for name, value in earlier[part.table].counters.items():
                    if part.counters[name] < value:
                        yield Finding("counters", f"{where}{name} of {part.table} fell")

    def _wrong_pairs(self) -> Iterator[Finding]:
        snapshots = {one.number: one for one in self._run.snapshots}
        for pair in self._run.pairs:
            servers = {part.server for part in snapshots[pair.numbers[0]].parts}
            for server in servers:
                if self._may_revert(server, pair.begun_s, pair.ended_s):
                    continue
                one, other = (_parts(snapshots[number], server) for number in pair.numbers)
                if pair.is_restored:
                    one, other = ([_without_version(own) for own in some] for some in (one, other))
                if one != other:
                    what = "restored" if pair.is_restored else "saved"
                    text = f"server {server} is not the same in versions {pair.numbers}"
                    yield Finding("pair", f"{text}, {what} one after the other")

    def _sure(self, snapshot: Snapshot, server: int) -> set[int]:
        """Returns the updates that are in the cut of a server for certain."""
        place = snapshot.number, server
        if place not in self._in:
            shown = {
                number
                for part in _parts(snapshot, server)
                for made, _ in part.rows.values()
                for number in made
                if number in self._attempts
            }
            kept = [
                self._attempts[number][0] for number in shown if len(self._attempts[number]) == 1
            ]
            self._in[place] = shown | {
                number
                for number in self._attempts
                if self._is_answered(number, snapshot.begun_s)
                and self._has_keys(number, server, snapshot)
                and not self._losing(number, server, snapshot.ended_s, kept)
            }
        return self._in[place]

    def _maybe(self, snapshot: Snapshot) -> set[int]:
        return {
            number
            for number, attempts in self._attempts.items()
            if any(one.begun_s < snapshot.ended_s for one in attempts)
        }

    def _losing(
        self, number: int, server: int, until_s: float, kept: Sequence[Attempt]
    ) -> list[Span]:
        """Returns the losses of a server that explain that an answered update is gone."""
        attempts = self._attempts[number]
        begun_s = min(one.begun_s for one in attempts)
        answered_s = min(one.ended_s for one in attempts if one.outcome == "ok")
        crashes = [
            one
            for one in self._run.history.crashes_of(server)
            if one.ended_s >= begun_s and one.begun_s <= until_s
        ]
        if server in self._run.cut_servers:
            return crashes
        if self._is_durable:
            return []
        return [
            crash
            for crash in crashes
            if not any(
                entry.begun_s > answered_s and entry.ended_s < crash.begun_s
                for entry in [*self._run.history.entries, *kept]
            )
        ]

    def _may_revert(self, server: int, begun_s: float, ended_s: float) -> bool:
        """Returns True if a loss of a server may have taken updates away in a time."""
        if self._is_durable and server not in self._run.cut_servers:
            return False
        crashes = self._run.history.crashes_of(server)
        return any(one.begun_s <= ended_s and one.ended_s >= begun_s for one in crashes)

    def _is_answered(self, number: int, at_s: float) -> bool:
        return any(
            one.outcome == "ok" and one.ended_s < at_s for one in self._attempts.get(number, [])
        )

    def _is_before(self, number: int, other: int) -> bool:
        """Returns True if an update was answered before another one was first sent."""
        attempts = self._attempts.get(other, [])
        begun_s = min((one.begun_s for one in attempts), default=0.0)
        return self._is_answered(number, begun_s)

    def _num_keys(self, number: int, part: PartState) -> int:
        return len(self._plan.keys_on(number, part.table, part.server))

    def _has_keys(self, number: int, server: int, snapshot: Snapshot) -> bool:
        return any(
            len(self._plan.keys_on(number, part.table, server)) for part in _parts(snapshot, server)
        )


def _parts(snapshot: Snapshot, server: int) -> list[PartState]:
    return [part for part in snapshot.parts if part.server == server]


def _without_version(part: PartState) -> Any:
    return dataclasses.replace(part, version=0)
