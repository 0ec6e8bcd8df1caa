"""Admission, eviction and counters, against a replay with dictionaries."""

from __future__ import annotations

import os
import statistics
import struct

import numpy as np
import pytest
from scipy import stats

from stratagem.parameter_server.server.tables import key_slots as growing_array
from stratagem.parameter_server.server.tables.disk_rows import RowFile
from stratagem.parameter_server.server.tables.key_slots import (
    GrowingArray,
)
from stratagem.parameter_server.server.tables.keyed_rows import KeyedRows
from stratagem.parameter_server.server.tables.table_options import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    RowInitializer,
    TableOptions,
    WithProbability,
    are_drawn,
)
from stratagem.parameter_server.server.tables.tiered_shard import RowFrames
from tests.unit.parameter_server.server.tables.scalar_hash import (
    GOLDEN,
    KEYS,
    MASK,
    mixed,
    seeded_key,
)


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


# Initial rows by key, against one number at a time in Python.

NORMAL = statistics.NormalDist()


def rounded(number: float) -> float:
    """To single precision."""
    return struct.unpack("f", struct.pack("f", number))[0]


def scalar(one: RowInitializer, key: int, column: int) -> float:
    """A column of a key's row."""
    word = mixed((seeded_key(key, one.seed) + (column // 2 + 1) * GOLDEN) & MASK)
    bits = word >> 32 if column % 2 else word & 0xFFFFFFFF
    if one.kind == "uniform":
        scaled = rounded((bits >> 8) * rounded((one.b - one.a) / 2**24))
        return rounded(scaled + rounded(one.a))
    share = (bits + 0.5) / 2**32
    if one.kind == "truncated_normal":
        low = NORMAL.cdf(-2)
        share = low + (1 - 2 * low) * share
    return rounded(one.a + one.b * NORMAL.inv_cdf(share))


def rows(one: RowInitializer, keys: list[int], width: int) -> np.ndarray:
    return one.rows(np.array(keys, np.int64), (width,), np.dtype(np.float32))


@pytest.mark.parametrize("seed", [0, 12345678901234567890])
@pytest.mark.parametrize(
    ("kind", "a", "b"), [("uniform", -0.05, 0.05), ("normal", 1, 3), ("truncated_normal", 0, 0.05)]
)
def test_rows_are_those_of_scalar_python(kind, a, b, seed) -> None:
    one = RowInitializer(kind, a, b, seed)
    wanted = [[scalar(one, key, column) for column in range(5)] for key in KEYS]
    got = rows(one, KEYS, 5)
    if kind == "uniform":
        assert got.tolist() == wanted
    else:  # two formulas of the normal distribution
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


def test_rows_do_not_depend_on_their_company_or_order() -> None:
    one = RowInitializer("normal", 0, 1, 7)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000)
    together = one.rows(keys, (20,), np.dtype(np.float32))  # in several pieces
    order = np.random.default_rng(1).permutation(5000)
    np.testing.assert_array_equal(one.rows(keys[order], (20,), together.dtype), together[order])
    np.testing.assert_array_equal(one.rows(keys[7:8], (20,), together.dtype), together[7:8])
    assert rows(RowInitializer("constant", 3), [1, 2], 2).tolist() == [[3, 3], [3, 3]]
    assert rows(RowInitializer(), [], 2).shape == (0, 2)
    for shape, dtype in (((4,), np.float16), ((), np.float32)):
        other = RowInitializer("uniform", 0, 1).rows(np.array([1, 2]), shape, np.dtype(dtype))
        assert (other.shape, other.dtype) == ((2, *shape), dtype)
    # More columns begin with the same ones; a row of several axes has the same numbers.
    np.testing.assert_array_equal(
        one.rows(keys, (3, 7), together.dtype).reshape(5000, 21)[:, :20], together
    )


# Records in a file, against a dictionary.

TYPE = np.dtype([("row", np.float32, (3,)), ("count", np.uint8)])


def write(file: RowFile, numbers: np.ndarray, value: float) -> None:
    records = file.empty(len(numbers))
    records["row"], records["count"] = value + numbers[:, None], 7
    file.write(numbers, records)


@pytest.mark.parametrize("is_moved", [False, True])
def test_damaged_and_moved_records_are_found(tmp_path, monkeypatch, is_moved) -> None:
    path = tmp_path / "rows"
    numbers = np.arange(50)
    with RowFile(path, TYPE) as file:
        write(file, numbers, 0.0)
        size = file.record_bytes
        assert size == 24
        data = bytearray(path.read_bytes())
        if is_moved:
            data[7 * size : 8 * size] = data[9 * size : 10 * size]
        else:
            data[7 * size + 15] ^= 4
        path.write_bytes(data)
        are_valid = file.are_valid(numbers, file.read(numbers))
    assert np.flatnonzero(~are_valid).tolist() == [7]
    pread, pwrite = os.pread, os.pwrite  # may be short, and are continued
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 7), at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:5], at))
    with RowFile(tmp_path / "short", TYPE) as file:
        write(file, np.array([1, 2, 9]), 0.5)
        got = file.read(np.array([1, 2, 9]))
        assert file.are_valid(np.array([1, 2, 9]), got).all()
        np.testing.assert_array_equal(got["row"][:, 0], [1.5, 2.5, 9.5])


# Rows in memory, and arrays that grow in place.


def test_frames_that_were_used_stay() -> None:
    frames = RowFrames(1000, 1000, lambda slots: slots >= 0)
    frames.grow(1000)
    frames.add(np.arange(100))
    frames.make_room(1, 100)  # the hand passes over all frames once
    frames.add(np.array([100]))
    frames.use(frames.find(np.arange(50, 100)))
    frames.make_room(40, 100)
    assert (frames.find(np.arange(50, 100)) >= 0).all()
    assert frames.num_used == 60


def filled(num_rows: int, most_rows: int) -> GrowingArray:
    growing = GrowingArray((2,), np.float32, most_rows)
    growing.grow(num_rows)
    growing.array[:num_rows] = np.arange(2 * num_rows).reshape(num_rows, 2)
    return growing


def test_array_grows_by_copies_if_memory_cannot_be_reserved(monkeypatch) -> None:
    monkeypatch.setattr(growing_array, "_COPIED_BYTES", 800)
    growing = filled(100, 2**58)
    growing.grow(101)
    assert len(growing.array) == 200
    np.testing.assert_array_equal(growing.array[99], [198, 199])
    with pytest.raises(MemoryError, match=r"memory for 11 rows.\nExpected at most 10 rows"):
        filled(3, 10).grow(11)
    with pytest.raises(MemoryError, match="memory for"):
        filled(2**57, 2**58)


@pytest.mark.parametrize(
    ("one", "law"),
    [
        (RowInitializer("uniform", -0.05, 0.05), stats.uniform(-0.05, 0.1)),
        (RowInitializer("normal", 1, 3), stats.norm(1, 3)),
        (RowInitializer("truncated_normal", 0, 2), stats.truncnorm(-2, 2, scale=2)),
    ],
)
def test_numbers_have_their_distribution(one, law) -> None:
    numbers = rows(one, [*range(20_000)], 10)
    assert stats.kstest(numbers.reshape(-1), law.cdf).pvalue > 1e-3
    assert abs(numbers.mean() - law.mean()) < 5 * law.std() / len(numbers.reshape(-1)) ** 0.5
    np.testing.assert_allclose(numbers.std(), law.std(), rtol=0.01)
    # Neither columns nor neighboring keys are correlated.
    centered = (numbers - law.mean()) / law.std()
    columns = centered.T @ centered / len(centered) - np.eye(10)
    assert abs(columns).max() < 6 / 20_000**0.5
    assert abs((centered[1:] * centered[:-1]).mean()) < 6 / 200_000**0.5
