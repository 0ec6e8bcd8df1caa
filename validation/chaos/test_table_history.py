"""Checker of keyed tables: accepts what servers do, and finds each flaw of doctored versions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.server.shards import Slot, State
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from stratagem.parameter_server.server.tables.table_chains import compact
from tests.unit.parameter_server.table_clusters import table_cluster
from validation.chaos.history import Attempt, History, Span
from validation.chaos.recording import Recorder
from validation.chaos.table_history import (
    Operation,
    Pair,
    TableHistory,
    check_tables,
    read_table_history,
)
from validation.chaos.table_states import (
    KEYS,
    TABLES,
    WIDTH,
    PartState,
    Plan,
    Snapshot,
    read_snapshot,
)

PLAN = Plan(7, 120)
OPTIONS: dict[str, dict[str, Any]] = {
    "recent": {"eviction": {"kind": "LeastRecent"}, "max_rows": 24},
    "aged": {
        "admission": {"kind": "AfterSightings", "sightings": 2},
        "eviction": {"kind": "NotSeenFor", "steps": 20},
    },
    "tiered": {"eviction": {"kind": "LeastRecent"}, "max_rows": 60},
}
Rows = dict[int, tuple[Mapping[int, int], int]]


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Adds gradients."""

    def describe(self) -> dict[str, Any]:
        return {"name": "sgd"}

    def scalars(self) -> dict[str, np.ndarray]:
        return {}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        return []

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        values = {name: state.values[name] + gradient for name, gradient in grads.items()}
        return State({}, values, {name: {} for name in grads})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TableHistory:
    """A run of two servers, whose versions 1 to 5 are changes, and 6 is all rows."""
    folder = tmp_path_factory.mktemp("saved")
    versions = TableVersions(folder)
    updates: list[Attempt] = []
    snapshots: list[Snapshot] = []
    with table_cluster(2, with_table=False) as cluster:
        for name in TABLES:
            table = {"initializer": {"kind": "constant", "a": 0.0}, **OPTIONS[name]}
            cluster.client.create(layout_of_keys(name, (WIDTH,), "float32", [0, 1], table), None)
        cluster.client.set_rule(Sgd(), list(TABLES))
        number = None
        for update in range(len(PLAN)):
            rows = {name: (PLAN.keys(update, name), PLAN.gradient(update, name)) for name in TABLES}
            cluster.client.push({}, rows)
            updates.append(Attempt("one", update, TABLES, update, update + 0.5, "ok"))
            if update % 24 == 23:
                number = cluster.tables.save(versions, number)
                snapshots.append(read_snapshot(folder, number, PLAN, update + 0.6, update + 0.7))
        number = cluster.tables.save(versions)
        snapshots.append(read_snapshot(folder, number, PLAN, len(PLAN), len(PLAN) + 1))
    compact(versions, 3)
    for snapshot in snapshots[2:]:
        assert read_snapshot(folder, snapshot.number, PLAN).digest == snapshot.digest
    (versions.folder / "00000004" / "aged-0.rows").write_bytes(b"torn")
    with pytest.raises(DataLossError, match=r"aged-0\.rows"):
        read_snapshot(folder, 4, PLAN)
    pairs = [Pair((5, 6), 119.0, len(PLAN) + 1.0)]
    return TableHistory(History(updates), snapshots, pairs)


def kinds(run: TableHistory, *, is_durable: bool = False, **others: Any) -> set[str]:
    found = check_tables(run, PLAN, is_durable=is_durable, **others)
    return {finding.kind for finding in found}


def doctored(
    run: TableHistory, place: int, table: str, change: Callable[[PartState], PartState]
) -> TableHistory:
    """Changes a table of the first server in a version."""
    snapshots = [*run.snapshots]
    parts = tuple(
        change(part) if (part.table, part.server) == (table, 0) else part
        for part in snapshots[place].parts
    )
    snapshots[place] = dataclasses.replace(snapshots[place], parts=parts)
    return dataclasses.replace(run, snapshots=snapshots)


def with_rows(run: TableHistory, place: int, table: str, change: Callable[[Rows], None]) -> Any:
    def changed(part: PartState) -> PartState:
        rows = dict(part.rows)
        change(rows)
        return dataclasses.replace(part, rows=rows)

    return doctored(run, place, table, changed)


def longest(rows: Rows) -> int:
    return max(rows, key=lambda key: len(rows[key][0]))


@pytest.mark.slow
def test_run_keeps_its_promises(run) -> None:
    assert check_tables(run, PLAN, is_durable=False) == []
    assert check_tables(run, PLAN, is_durable=True) == []
    counters = [part.counters for part in run.snapshots[-1].parts]
    assert sum(one["evicted"] for one in counters) > 100
    assert sum(one["refused_updates"] for one in counters) > 50


def test_lost_update_is_found(run) -> None:
    def lose(rows: Rows) -> None:
        key = longest(rows)
        made = dict(rows[key][0])
        del made[sorted(made)[1]]
        rows[key] = made, len(made)

    assert {"lost", "count"} <= kinds(with_rows(run, 5, "recent", lose))

    # a row whose count was left as it is, and the last update
    def lose_last(rows: Rows) -> None:
        made, count = rows[longest(rows)]
        rows[longest(rows)] = dict.fromkeys(sorted(made)[:-1], 1), count

    assert {"lost", "count"} <= kinds(with_rows(run, 5, "recent", lose_last))


def test_doubled_update_is_found(run) -> None:
    def double(rows: Rows) -> None:
        made, count = rows[longest(rows)]
        rows[longest(rows)] = {**made, min(made): 2}, count

    assert "doubled" in kinds(with_rows(run, 5, "tiered", double))


def test_evicted_row_that_comes_back_is_found(run) -> None:
    first, second = (
        {part.table: part.rows for part in one.parts if not part.server}["recent"]
        for one in (run.snapshots[2], run.snapshots[3])
    )
    begun_anew = [
        key for key in first.keys() & second.keys() if not first[key][0].keys() & second[key][0]
    ]
    gone = sorted(first.keys() - second.keys())

    def merge(rows: Rows) -> None:
        key = begun_anew[0]
        made = {**first[key][0], **rows[key][0]}
        rows[key] = made, len(made)

    def bring_back(rows: Rows) -> None:
        rows[gone[0]] = first[gone[0]]

    # an evicted row has all updates that it had, and those since: no row shows a gap
    assert begun_anew
    assert gone
    assert "count" in kinds(with_rows(run, 3, "recent", merge))
    assert "counters" in kinds(with_rows(run, 3, "recent", bring_back))
    tables = [
        {part.table: part.rows for part in one.parts if not part.server}["recent"]
        for one in run.snapshots
    ]
    place = next(  # of a version with a row that the next one has, too
        place
        for place, (rows, later) in enumerate(itertools.pairwise(tables))
        if any(rows[key][0].keys() & later[key][0] for key in rows.keys() & later.keys())
    )
    absent = dataclasses.replace(run, snapshots=run.snapshots[: place + 2], pairs=[])
    without = with_rows(absent, place, "recent", lambda rows: [rows.pop(one) for one in [*rows]])
    assert "back" in kinds(without)


@pytest.mark.slow
def test_delta_of_other_changes_is_found(run) -> None:
    """A version mixes rows of two moments: those that changed are as they were before."""
    earlier = {(part.table, part.server): part.rows for part in run.snapshots[3].parts}

    def mix(rows: Rows) -> None:
        rows |= {key: row for key, row in earlier["tiered", 0].items() if key in rows}

    assert {"lost", "pair"} <= kinds(with_rows(run, 4, "tiered", mix))

    def remake(rows: Rows) -> None:
        key = longest(rows)
        rows[key] = {**rows[key][0], -1: 1}, rows[key][1]

    assert "torn" in kinds(with_rows(run, 4, "aged", remake))
    assert kinds(dataclasses.replace(run, torn=["no such file"])) == {"torn"}
    digests = {one.number: one.digest for one in run.snapshots}
    saved = dataclasses.replace(run, digests=digests)
    assert kinds(saved, found=digests) == set()
    assert kinds(saved, found={**digests, 4: digests[3]}) == {"torn"}


def test_cut_is_a_prefix(run) -> None:
    def fewer(part: PartState) -> PartState:
        return dataclasses.replace(part, version=part.version - 1)

    assert "cut" in kinds(doctored(run, 2, "aged", fewer))
    late = dataclasses.replace(run.snapshots[1], number=9, begun_s=119.7, ended_s=119.8)
    mixed = dataclasses.replace(run, snapshots=[*run.snapshots[:4], late], pairs=[])
    assert {"cut", "count", "lost"} <= kinds(mixed)


def test_update_that_nobody_sent_is_found(run) -> None:
    updates = [one for one in run.history.updates if one.number != 119]
    assert "unsent" in kinds(dataclasses.replace(run, history=History(updates)))


def test_counters_are_those_of_the_rows(run) -> None:
    for name in ("evicted_updates", "refused_updates"):

        def one_less(part: PartState, name: str = name) -> PartState:
            counters = {**part.counters, name: part.counters[name] - 1}
            return dataclasses.replace(part, counters=counters)

        assert "count" in kinds(doctored(run, 4, "aged", one_less))

    def one_more(part: PartState) -> PartState:
        return dataclasses.replace(
            part, counters={**part.counters, "created": part.counters["created"] + 1}
        )

    assert "counters" in kinds(doctored(run, 4, "recent", one_more))


@pytest.mark.slow
def test_loss_needs_a_lost_server(run) -> None:
    """The state of an earlier version is what a killed server may have, and no other one."""
    late = dataclasses.replace(run.snapshots[3], number=9, begun_s=130, ended_s=131)
    snapshots = [*run.snapshots, late]
    for crash_s, entry_s, is_durable, is_good in (
        (121, None, False, True),
        (121, 96.2, False, True),
        (121, 120.5, False, False),
        (121, None, True, False),
        (80, None, False, False),
    ):
        crashes = {server: [Span(crash_s, crash_s + 1)] for server in range(2)}
        entries = [] if entry_s is None else [Span(entry_s, entry_s + 0.1)]
        history = History(run.history.updates, entries=entries, crashes=crashes)
        lost = dataclasses.replace(run, history=history, snapshots=snapshots)
        assert (kinds(lost, is_durable=is_durable) == set()) == is_good
    cut = dataclasses.replace(lost, cut_servers=frozenset([0, 1]))
    crashes = {server: [Span(121, 122)] for server in range(2)}
    cut = dataclasses.replace(cut, history=History(run.history.updates, crashes=crashes))
    assert kinds(cut, is_durable=True) == set()


def test_records_become_a_history(tmp_path) -> None:
    for name in ("records", "states"):
        (tmp_path / name).mkdir()
    recorder = Recorder(tmp_path / "records")
    with recorder.span("update", number=3, cells=TABLES):
        recorder.note("made", operation="save", number=1, begun_s=1.0)
    recorder.note("failed", operation="publish", begun_s=1.0, why="killed")
    recorder.note("state", number=1, digest="abc")
    recorder.note("pair", pair=(1, 2), begun_s=0.5, is_restored=True)
    recorder.note("torn", why="damaged")
    recorder.note("restoring")
    part = PartState("aged", 1, 4, {"created": 2}, {int(KEYS[0]): ({3: 1}, 1)}, {5: 1})
    snapshot = Snapshot(1, 0.5, 0.75, (part,))
    (tmp_path / "states" / "1.json").write_text(snapshot.to_json())
    found = read_table_history(Path(tmp_path))
    assert [one.number for one in found.history.updates] == [3]
    assert found.snapshots == [snapshot]
    assert found.operations == [Operation("save", 1), Operation("publish", None, "killed")]
    assert (found.digests, found.torn) == ({1: "abc"}, ["damaged"])
    ((pair),) = found.pairs
    assert (pair.numbers, pair.begun_s, pair.is_restored) == ((1, 2), 0.5, True)
    assert found.restored_s < float("inf")


def test_value_that_no_update_explains() -> None:
    key = int(PLAN.keys(0, "aged")[0])
    row = np.zeros(WIDTH, np.float32)
    assert PLAN.made("aged", key, row) == {}
    row[0] = 16**0 + 2 * 16**1
    first, second = PLAN.numbers["aged", key][:2]
    assert PLAN.made("aged", key, row) == {first: 1, second: 2}
    for value in (0.5, -1, 2.0**24):
        row[0] = value
        assert PLAN.made("aged", key, row) == {-1: 1}
    row[:] = 0
    row[-1] = 1
    assert PLAN.made("aged", key, row) == {-1: 1}
