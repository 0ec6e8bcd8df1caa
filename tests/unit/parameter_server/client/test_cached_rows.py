"""Cached rows, against a dictionary and the history of a table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stratagem.parameter_server.client import distinct_rows
from stratagem.parameter_server.client import distinct_rows as distinct_keys
from stratagem.parameter_server.client.distinct_rows import (
    DistinctIds,
    DistinctKeys,
    DistinctRows,
    representatives,
)
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.row_reads import CachedRows, CachedTable, Wanted
from stratagem.parameter_server.client.shard_layout import ShardLayout, layout_of_keys

NUM_ROWS = 40
TABLE = ShardLayout("table", (NUM_ROWS, 2), "float32", (0, 1), (25, 15), has_rows=True)
Rows = tuple[np.ndarray, np.ndarray]


def one_by_one(fetch: Callable[[DistinctRows], Rows]) -> Callable[[Sequence[Wanted]], list[Rows]]:
    """Rows of several tables, each from a function of its distinct ids alone."""
    return lambda several: [fetch(wanted) for _, wanted in several]


class Servers:
    """A table whose rows all have the number of the last write, and its version."""

    def __init__(self, cache: CachedRows) -> None:
        self.cache = cache
        self.values = np.zeros(NUM_ROWS, np.int64)
        self.version = 0
        self.asked: list[int] = []
        self.lifetimes = [1, 1]
        self.answer()

    def answer(self) -> None:
        for server, lifetime in enumerate(self.lifetimes):
            self.cache.note_lifetime(server, lifetime)

    def write(self, ids: Sequence[int]) -> None:
        self.version += 1
        self.values[list(ids)] = self.version

    def fetch(self, wanted: DistinctRows) -> Rows:
        self.asked += wanted.ids.tolist()
        self.answer()
        rows = np.repeat(self.values[wanted.ids, None], 2, axis=1).astype(np.float32)
        return rows, np.full(len(wanted.ids), self.version)

    def look_up(self, ids: Sequence[int], fetch: Callable[[DistinctRows], Rows] | None = None):
        """Returns values and versions by id, and the ids that the servers were asked for."""
        self.asked = []
        wanted = DistinctIds().of(TABLE, np.array(ids, np.int64))
        ((rows, versions),) = self.cache.rows([(TABLE, wanted)], one_by_one(fetch or self.fetch))
        assert rows.shape == (len(ids), 2)
        assert (rows[:, 0] == rows[:, 1]).all()
        found: dict[int, int] = {}
        for one, value in zip(ids, rows[:, 0].astype(int).tolist(), strict=True):
            assert found.setdefault(one, value) == value
        return found, dict(zip(wanted.ids.tolist(), versions.tolist(), strict=True)), {*self.asked}


def servers_of(**options) -> Servers:
    return Servers(CachedRows(RowCache(**options)))


class Reference:
    """A dictionary with all rows that were read since the last invalidation."""

    def __init__(self, servers: Servers, options: RowCache) -> None:
        self.servers, self.options = servers, options
        self.read: dict[int, tuple[int, int, int]] = {}  # value, version and step
        self.num_steps = 0
        self.step([])

    def step(self, ids: Sequence[int]) -> None:
        self.num_steps += 1
        self.servers.cache.begin_step()

    def write_of_another(self, ids: Sequence[int]) -> None:
        self.servers.write(ids)

    def push(self, ids: Sequence[int]) -> None:
        self.servers.write(ids)
        self.servers.cache.note_pushed("table", np.array(ids, np.int64))
        for one in ids if self.options.reads_own_updates else ():
            self.read.pop(one, None)

    def assign(self, ids: Sequence[int]) -> None:
        self.servers.cache.drop("table")
        self.read.clear()

    def clear(self, ids: Sequence[int]) -> None:
        self.servers.cache.clear()
        self.read.clear()

    def restart(self, ids: Sequence[int]) -> None:
        self.servers.lifetimes[0] += 1
        self.servers.answer()
        self.read.clear()

    def look_up(self, ids: Sequence[int]) -> None:
        servers = self.servers
        found, versions, asked = servers.look_up(ids)
        assert found.keys() == {*ids}
        for one in found:
            if one in asked:
                self.read[one] = int(servers.values[one]), servers.version, self.num_steps
            value, version, step = self.read[one]
            assert (found[one], versions[one]) == (value, version)
            assert self.num_steps - step <= self.options.max_age_steps
        assert servers.cache.size_bytes <= self.options.max_rows * (2 * 4 + 56)


OPERATIONS = st.sampled_from(
    ["step", "look_up", "look_up", "write_of_another", "push", "assign", "clear", "restart"]
)
IDS = st.lists(st.integers(0, NUM_ROWS - 1), max_size=12)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(OPERATIONS, IDS), max_size=40),
    st.builds(
        RowCache,
        max_rows=st.integers(1, 50),
        max_age_steps=st.integers(1, 4),
        reads_own_updates=st.booleans(),
    ),
)
def test_random_operations_give_the_rows_of_a_dictionary(operations, options) -> None:
    reference = Reference(Servers(CachedRows(options)), options)
    for operation, ids in operations:
        getattr(reference, operation)(ids)


def test_rows_are_kept_for_the_steps_of_the_limit() -> None:
    servers = servers_of(max_rows=NUM_ROWS, max_age_steps=2)
    asked = []
    for _ in range(7):
        servers.cache.begin_step()
        asked.append(bool(servers.look_up([3])[2]))
    assert asked == [True, False, False] * 2 + [True]
    assert servers.cache.take_counts() == {"hits": 4, "misses": 3}
    assert servers.cache.take_counts() == {}


def test_new_rows_replace_those_that_were_read_first() -> None:
    servers = servers_of(max_rows=4, max_age_steps=100)
    servers.cache.begin_step()
    asked = [servers.look_up(ids)[2] for ids in ([0, 1], [2], [0, 3], [0, 4], [0, 1, 2, 3])]
    assert asked == [{0, 1}, {2}, {3}, {4}, {0}]


@pytest.mark.parametrize("num_rows", [1000, 10**6, None])  # of an index by id, and by hash
@pytest.mark.parametrize("max_rows", [1, 3, 125, 1000])
def test_memory_is_bounded_and_used(max_rows, num_rows) -> None:
    table = CachedTable(max_rows, num_rows, (4,), np.dtype(np.float32))
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**63), 2**63, 1000) if num_rows is None else rng.permutation(num_rows)
    ids = ids[:1000]
    rows = np.repeat(ids[:, None], 4, axis=1).astype(np.float32)
    for begin in range(0, 1000, 300):
        part = slice(begin, begin + 300)
        table.put(ids[part], rows[part], ids[part], step=1)
    slots, is_held = table.find(ids, 0)
    held = np.flatnonzero(is_held)
    assert max_rows * 3 // 4 <= len(held) <= max_rows
    assert len({*slots[held].tolist()}) == len(held)
    np.testing.assert_array_equal(table.take(slots[held]), rows[held])
    np.testing.assert_array_equal(table.versions(slots[held]), ids[held])
    assert table.size_bytes <= max_rows * (4 * 4 + 56)
    assert not table.find(ids, 2)[1].any()  # too old
    table.drop(np.repeat(ids, 2))
    assert not table.find(ids, 0)[1].any()


KEYS = st.sampled_from([0, -1, 1, 2**63 - 1, -(2**63), 2**32, 2**31, -(2**31), 5, 1 << 40])


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "find", "drop"]), st.lists(KEYS, unique=True)),
        max_size=30,
    ),
    st.integers(1, 12),
)
def test_any_integer_is_a_key(operations, max_rows) -> None:
    """A key is found with its newest row, or not at all; never before it was stored."""
    table = CachedTable(max_rows, None, (1,), np.dtype(np.float32))
    newest: dict[int, int] = {}
    for step, (operation, keys) in enumerate(operations):
        ids = np.array(keys, np.int64)
        if operation == "put":
            rows = np.full((len(ids), 1), step, np.float32)
            table.put(ids, rows, np.full(len(ids), step), step)
            newest |= dict.fromkeys(keys, step)
        elif operation == "drop":
            table.drop(ids)
            for key in keys:
                newest.pop(key, None)
        slots, is_hit = table.find(ids, -100)
        for key, slot, is_found in zip(keys, slots, is_hit, strict=True):
            assert not is_found or table.take(np.array([slot]))[0, 0] == newest[key]
        if operation == "put" and keys:
            first = np.flatnonzero(is_hit)
            assert len(first) >= 1  # the last of those with equal hashes is always found


def test_several_tables_are_fetched_together_and_invalidated_apart() -> None:
    other = ShardLayout("other", (NUM_ROWS, 2), "float32", (0, 1), (25, 15), has_rows=True)
    cache = CachedRows(RowCache(max_rows=NUM_ROWS, max_age_steps=9))
    calls: list[dict[str, list[int]]] = []
    drops_during: list[str] = []

    def fetch(several: Sequence[Wanted]) -> list[Rows]:
        calls.append({placement.name: wanted.ids.tolist() for placement, wanted in several})
        while drops_during:
            cache.drop(drops_during.pop())
        return [
            (np.repeat(wanted.ids[:, None], 2, 1).astype(np.float32), np.zeros(len(wanted.ids)))
            for _, wanted in several
        ]

    def look_up(ids: Sequence[int], more: Sequence[int]) -> None:
        cache.begin_step()
        wanted = [
            (placement, DistinctIds().of(placement, np.array(own)))
            for placement, own in ((TABLE, ids), (other, more))
        ]
        for (rows, _), own in zip(cache.rows(wanted, fetch), (ids, more), strict=True):
            np.testing.assert_array_equal(rows[:, 0], own)

    look_up([1, 1, 30], [2])
    assert calls == [{"table": [1, 30], "other": [2]}]
    calls.clear()
    look_up([30, 1], [2])
    assert calls == []
    look_up([30, 1], [2, 7])
    assert calls == [{"other": [7]}]
    calls.clear()
    drops_during.append("other")
    look_up([3, 1], [2, 8])
    assert calls == [{"table": [3], "other": [8]}, {"other": [2, 8]}]
    calls.clear()
    look_up([3, 1], [8])
    assert calls == [{"other": [8]}]  # nothing from before the drop was kept


@pytest.mark.parametrize("event", ["push", "assign", "clear", "restart"])
def test_rows_read_during_an_invalidation_are_read_again(event) -> None:
    servers = servers_of(max_rows=NUM_ROWS, max_age_steps=9)
    servers.cache.begin_step()
    servers.look_up([1])

    def fetch(wanted: DistinctRows) -> Rows:
        rows = servers.fetch(wanted)
        if len(servers.asked) == 1:  # before the answer arrives, another thread writes
            servers.write([1, 2])
            if event == "restart":
                servers.lifetimes[1] += 1
                servers.answer()
            else:
                act = {
                    "push": lambda: servers.cache.note_pushed("table", np.array([1, 2])),
                    "assign": lambda: servers.cache.drop("table"),
                    "clear": servers.cache.clear,
                }
                act[event]()
        return rows

    assert servers.look_up([1, 2], fetch)[0] == {1: 1, 2: 1}
    assert servers.look_up([1, 2])[2] == {1, 2}  # nothing from before was kept


def test_oldest_rows_of_a_step_count() -> None:
    servers = servers_of(max_rows=NUM_ROWS, max_age_steps=9, reads_own_updates=False)
    cache = servers.cache
    places = {one: DistinctIds().of(TABLE, np.array([one])) for one in (1, 2, 30)}

    def read(one: int) -> dict[int, tuple[int, int]]:
        ((_, versions),) = cache.rows([(TABLE, places[one])], one_by_one(servers.fetch))
        return cache.oldest(TABLE, places[one], versions)

    cache.begin_step()
    assert read(1) == {0: (1, 0)}
    servers.write([1])
    servers.write([2])
    assert read(2) == {0: (1, 0)}  # row 1 is older
    assert read(30) == {1: (1, 2)}
    cache.begin_step()
    assert read(2) == {0: (1, 2)}
    assert read(1) == {0: (1, 0)}


def test_popular_rows_are_in_the_cache() -> None:
    rng = np.random.default_rng(0)
    num_rows, num_ids = 20_000, 1_000
    placement = ShardLayout("table", (num_rows, 1), "float32", (0,), (num_rows,), has_rows=True)
    chances = 1 / np.arange(1, num_rows + 1)
    cache = CachedRows(RowCache(max_rows=4_000, max_age_steps=50))
    cache.note_lifetime(0, 1)

    def fetch(wanted: DistinctRows) -> Rows:
        return wanted.ids[:, None].astype(np.float32), np.zeros(len(wanted.ids), np.int64)

    for step in range(60):
        if step == 20:
            cache.take_counts()
        cache.begin_step()
        ids = rng.choice(num_rows, num_ids, p=chances / chances.sum())
        wanted = DistinctIds().of(placement, ids)
        ((rows, _),) = cache.rows([(placement, wanted)], one_by_one(fetch))
        np.testing.assert_array_equal(rows[:, 0], ids)
    counts = cache.take_counts()
    assert counts["hits"] > counts["misses"]


def test_threads_never_read_rows_beyond_the_limit() -> None:
    max_age, num_steps = 3, 150
    servers = servers_of(max_rows=20, max_age_steps=max_age)
    begun: list[int] = [0]  # last write before each step began
    counting = threading.Lock()
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            servers.write(range(NUM_ROWS))

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(num_steps):
            with counting:
                begun.append(int(servers.values.min()))
                servers.cache.begin_step()
                oldest = begun[max(0, len(begun) - 1 - max_age)]
            wanted = DistinctIds().of(TABLE, rng.integers(NUM_ROWS, size=10))
            ((rows, _),) = servers.cache.rows([(TABLE, wanted)], one_by_one(servers.fetch))
            assert rows.min() >= oldest

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(read, range(3)))
    finally:
        is_over.set()
        writer.join()
    assert servers.cache.take_counts()["hits"] > 0


# Distinct ids of lookups, against sets.


def layout(rows_of_shards: list[int], width: int = 2) -> ShardLayout:
    shape = (sum(rows_of_shards), width)
    servers = tuple(range(len(rows_of_shards)))
    return ShardLayout("table", shape, "float32", servers, tuple(rows_of_shards), has_rows=True)


@pytest.mark.parametrize("is_hashing", [False, True])
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_each_id_is_requested_once_of_its_shard(is_hashing, rows_of_shards, data) -> None:
    placement = layout(rows_of_shards)
    num_rows = placement.shape[0]
    found = DistinctIds()
    for _ in range(2):  # scratch memory of the first lookup must not matter to the second
        ids = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=20)), np.int32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distinct_rows, "_MOST_SCRATCH_ROWS", 0 if is_hashing else 10**6)
            wanted = found.of(placement, ids)
        owners = np.repeat(np.arange(len(rows_of_shards)), rows_of_shards)
        held = [wanted.ids[part].tolist() for part in wanted.parts]
        assert [sorted(own) for own in held] == [
            sorted({*ids[owners[ids] == shard].tolist()}) for shard in range(len(rows_of_shards))
        ]
        assert sum(map(len, held)) == len(wanted.ids)
        np.testing.assert_array_equal(wanted.ids[wanted.places], ids)
        table = np.arange(2 * num_rows, dtype=np.float32).reshape(num_rows, 2)
        np.testing.assert_array_equal(wanted.expanded(table[wanted.ids]), table[ids])
        rows = np.arange(2 * len(ids), dtype=np.float32).reshape(len(ids), 2)
        sums, last = np.zeros((num_rows, 2)), np.zeros((num_rows, 2))
        np.add.at(sums, ids, rows)
        np.testing.assert_array_equal(wanted.summed(rows), sums[wanted.ids])
        for place, row in zip(ids.tolist(), rows, strict=True):
            last[place] = row
        np.testing.assert_array_equal(wanted.last(rows), last[wanted.ids])
        numbers = {shard: held.tolist() for shard, _, held in wanted.held(placement)}
        assert numbers == {
            shard: (wanted.ids[part] - placement.first_rows[shard]).tolist()
            for shard, part in enumerate(wanted.parts)
        }


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=30), st.integers(1, 5)
)
def test_keys_are_requested_once_from_the_servers_of_their_buckets(keys, num_servers) -> None:
    placement = layout_of_keys("table", (2,), "float32", range(num_servers))
    wanted = DistinctIds().of(placement, np.array(keys, np.int64))
    assert sorted(wanted.ids.tolist()) == sorted({*keys})
    assert wanted.ids[wanted.places].tolist() == keys
    sent = {shard: own.tolist() for shard, _, own in wanted.held(placement)}
    owners = placement.shards_of(wanted.ids)
    assert sent == {shard: wanted.ids[owners == shard].tolist() for shard in range(num_servers)}
    rows = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    sums = {key: np.zeros(2) for key in keys}
    for key, row in zip(keys, rows, strict=True):
        sums[key] = sums[key] + row
    for key, total in zip(wanted.ids.tolist(), wanted.summed(rows), strict=True):
        np.testing.assert_array_equal(total, sums[key])


@pytest.mark.parametrize("num_servers", [1, 3])
def test_keys_in_other_integer_types(num_servers) -> None:
    placement = layout_of_keys("table", (2,), "float32", range(num_servers))
    large = np.array([2**64 - 1, 7, 2**63], np.uint64)
    assert {*DistinctIds().of(placement, large).ids.tolist()} == {-1, 7, -(2**63)}
    assert {*DistinctIds().of(placement, np.array([3, 3, 1], np.int8)).ids.tolist()} == {1, 3}
    assert len(DistinctIds().of(placement, np.array([])).ids) == 0
    with pytest.raises(TypeError, match="Keys of dtype float64 were looked up in 'table'"):
        DistinctIds().of(placement, np.array([0.5]))


@given(st.lists(st.integers(0, 11), max_size=30), st.data())
def test_subset_is_partitioned_like_the_whole(ids, data) -> None:
    placement = layout([5, 0, 4, 3])
    wanted = DistinctIds().of(placement, np.array(ids, np.int64))
    chosen = np.array([data.draw(st.booleans()) for _ in wanted.ids], bool)
    part = wanted.subset(chosen)
    assert part.ids.tolist() == wanted.ids[chosen].tolist()
    owners = np.repeat(np.arange(4), placement.rows)
    assert [part.ids[own].tolist() for own in part.parts] == [
        part.ids[owners[part.ids] == shard].tolist() for shard in range(4)
    ]


@pytest.mark.parametrize(("ids", "given"), [([-1, 3], "-1 to 3"), ([0, 12], "0 to 12")])
def test_ids_out_of_range_are_refused(ids, given) -> None:
    with pytest.raises(IndexError, match=f"Ids from {given} were looked up in 'table'"):
        DistinctIds().of(layout([6, 6]), np.array(ids))


def test_threads_share_scratch_memory() -> None:
    placement, found = layout([1000]), DistinctIds()

    def look_up(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(1000, size=5000)
        wanted = found.of(placement, ids)
        return bool((wanted.ids[wanted.places] == ids).all()) and len({*wanted.ids}) == len(
            wanted.ids
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look_up, range(100)))


def test_distinct_keys_are_in_the_order_of_shards_and_hashed_for_another_layout() -> None:
    keys = np.random.default_rng(0).choice(2**60, 500, replace=False)
    two, three = (layout_of_keys("t", (2,), "float32", range(count)) for count in (2, 3))
    known, order = DistinctKeys.ordered(two, keys)
    np.testing.assert_array_equal(np.asarray(known), keys[order])
    np.testing.assert_array_equal(np.array(known, copy=True), keys[order])
    rows = DistinctIds().of(two, known)
    assert rows is known.rows
    for shard, _, own in rows.held(two):
        assert set(two.shards_of(own)) == {shard}
    values = keys[order][:, None] * 1.0
    assert rows.expanded(values) is values
    assert rows.summed(values) is values
    moved = DistinctIds().of(three, known)
    assert sorted(moved.ids) == sorted(keys)
    for shard, _, own in moved.held(three):
        assert set(three.shards_of(own)) == {shard}


# Equal keys of a lookup, against NumPy's sorted sets and keys whose hashes collide.

ANY_KEYS = arrays.arrays(
    np.int64,
    st.integers(0, 200),
    elements=st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 4),
    fill=st.nothing(),
)


def check(keys: np.ndarray) -> None:
    found = representatives(keys)
    assert found.shape == keys.shape
    np.testing.assert_array_equal(keys[found], keys)
    assert len(np.unique(found)) == len(np.unique(keys))


@pytest.mark.slow
@given(ANY_KEYS)
def test_equal_keys_and_only_these_have_one_representative(keys) -> None:
    check(keys)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["apart", "colliding"])
@given(ANY_KEYS)
def test_keys_with_equal_hashes_are_told_apart(second, keys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct_keys, "_FIRST", np.uint64(0))
        if second == "colliding":
            patch.setattr(distinct_keys, "_SECOND", np.uint64(0))
        check(keys)


@pytest.mark.parametrize("step", [1, 2**11, 2**32, 2**52, 2**61])
def test_regular_keys(step) -> None:
    keys = np.arange(-5_000, 5_000, dtype=np.int64) * np.int64(step)
    check(np.concatenate([keys, keys[::3]]))


def test_strided_keys() -> None:
    check(np.arange(40, dtype=np.int64)[::-4])
