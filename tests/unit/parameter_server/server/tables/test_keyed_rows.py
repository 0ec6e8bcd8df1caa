"""Admission, eviction and counters, against a replay with dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.parameter_server.server.tables.keyed_rows import KeyedRows
from stratagem.parameter_server.server.tables.policies import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    WithProbability,
    are_drawn,
)
from stratagem.parameter_server.server.tables.table_options import RowInitializer, TableOptions


class Replay:
    """Rows as [number of updates, last version] by key. Equal rows are evicted by slot."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self.rows: dict[int, list[int]] = {}
        self.candidates: dict[int, list[int]] = {}
        self.counters = dict.fromkeys(("created", "evicted", "evicted_updates"), 0)
        self.refused = self.applied = 0

    def update(self, table: KeyedRows, keys: list[int], version: int) -> None:
        options, most = self.options, self.options.max_rows or 2**31
        known = [key for key in keys if key in self.rows]
        wanted = [key for key in keys if key not in self.rows and self._admits(key, version)]
        evicts = isinstance(options.eviction, LeastFrequent | LeastRecent)
        room = most - (len(known) if evicts else len(self.rows))
        made = wanted[:room]
        excess = len(self.rows) + len(made) - most
        if excess > 0:
            num_evicted = max(excess, len(self.rows) // 64)
            others = [key for key in self.rows if key not in known]
            slots = dict(zip(others, table.rows.find(np.array(others, np.int64)), strict=True))
            self._evict(sorted(others, key=lambda key: self._rank(key, slots[key]))[:num_evicted])
        for key in made:
            self.rows[key] = [0, 0]
            self.candidates.pop(key, None)
        for key in keys:
            place = self.rows if key in self.rows else self.candidates
            place[key] = [place.get(key, [0])[0] + 1, version]
        self.counters["created"] += len(made)
        self.refused += len(keys) - len(known) - len(made)
        self.applied += len(keys)
        if isinstance(options.eviction, NotSeenFor):
            steps = options.eviction.steps
            self._evict([key for key, (_, seen) in self.rows.items() if version - seen >= steps])

    def _admits(self, key: int, version: int) -> bool:
        admission = self.options.admission
        if isinstance(admission, AfterSightings):
            return self.candidates.get(key, [0])[0] + 1 >= admission.sightings
        if isinstance(admission, WithProbability):
            return bool(are_drawn(admission, np.array([key]), version)[0])
        return True

    def _rank(self, key: int, slot: int) -> tuple[int, ...]:
        count, seen = self.rows[key]
        return (count if isinstance(self.options.eviction, LeastFrequent) else 0, seen, slot)

    def _evict(self, keys: list[int]) -> None:
        for key in keys:
            self.counters["evicted"] += 1
            self.counters["evicted_updates"] += self.rows.pop(key)[0]


def assert_same(table: KeyedRows, replay: Replay) -> None:
    slots = table.rows.used
    state = zip(table.rows.counts[slots].tolist(), table.rows.seen[slots].tolist(), strict=True)
    got = dict(zip(table.rows.index.keys[slots].tolist(), map(list, state), strict=True))
    assert got == replay.rows
    wanted = {**replay.counters, "refused_updates": replay.refused}
    assert table.counters == wanted
    # The promise of updates.
    counted = sum(count for count, _ in replay.rows.values())
    assert counted + wanted["evicted_updates"] + replay.refused == replay.applied


UNIFORM = RowInitializer("uniform", -1, 1)


@pytest.mark.parametrize(
    "options",
    [
        TableOptions(UNIFORM),
        TableOptions(UNIFORM, AfterSightings(1), NotSeenFor(5)),
        TableOptions(UNIFORM, AfterSightings(3), NotSeenFor(7)),
        TableOptions(UNIFORM, WithProbability(0.3), LeastRecent(), 200),
        TableOptions(UNIFORM, AfterSightings(2), LeastFrequent(), 200),
        TableOptions(UNIFORM, None, LeastFrequent(), 30),
        TableOptions(UNIFORM, None, LeastRecent(), 65),
        TableOptions(UNIFORM, None, None, 150),
        TableOptions(UNIFORM, AfterSightings(2), NotSeenFor(9), 60),
    ],
    ids=str,
)
def test_rows_are_those_of_a_replay(options) -> None:
    rng = np.random.default_rng(0)
    table, replay = KeyedRows(options, options.max_rows or 10_000), Replay(options)
    for version in range(1, 120):
        # Few keys are frequent, and the frequent ones change.
        keys = np.unique(rng.zipf(1.3, 60) % 500 + version // 40 * 250) - 100
        keys = rng.permutation(keys)
        sighting = table.sighting(keys, version)
        assert len(sighting) + len(sighting.refused) == len(keys)
        replay.update(table, keys.tolist(), version)
        slots = table.keep(sighting, version)
        if sighting.order is not None:
            keys = keys[sighting.order]
        np.testing.assert_array_equal(table.rows.index.keys[slots], keys)
        table.evict_aged(version)
        assert_same(table, replay)
    assert replay.counters["created"] > 20


def test_deciding_changes_nothing() -> None:
    table = KeyedRows(TableOptions(UNIFORM, AfterSightings(2)), 100)
    for _ in range(3):
        assert len(table.sighting(np.arange(5), 1).refused) == 5
    assert len(table.rows) == len(table.candidates) == 0


def test_candidates_beyond_the_limit_are_forgotten_the_oldest_first() -> None:
    table = KeyedRows(TableOptions(UNIFORM, AfterSightings(2, max_candidates=10)), 100)

    def update(version: int, *keys: int) -> list[int]:
        sighting = table.sighting(np.array(keys), version)
        table.keep(sighting, version)
        assert len(table.candidates) <= 10
        return sighting.new.tolist()

    for version in range(6):
        assert not update(version, 2 * version, 2 * version + 1)
    # 0 and 1 were forgotten: their count begins anew, and 2 and 3 are now forgotten.
    assert not update(7, 0, 1)
    assert update(8, 0, 1, 4, 5) == [0, 1, 4, 5]
    assert not update(9, 2, 3)
    assert not update(10, *range(100, 150))
    assert update(11, *range(100, 150)) == [*range(100, 110)]


def test_an_update_larger_than_the_table_makes_what_fits() -> None:
    table = KeyedRows(TableOptions(UNIFORM, None, LeastRecent(), 10), 10)
    table.keep(table.sighting(np.arange(8), 1), 1)
    sighting = table.sighting(np.arange(4, 30), 2)
    assert (len(sighting.slots), sighting.new.tolist()) == (4, [*range(8, 14)])
    table.keep(sighting, 2)
    assert sorted(table.rows.index.keys[table.rows.used]) == [*range(4, 14)]
    assert table.counters == {
        "created": 14,
        "evicted": 4,
        "evicted_updates": 4,
        "refused_updates": 16,
    }
