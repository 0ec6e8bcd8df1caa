"""Distinct ids of lookups, against sets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stratagem.parameter_server.client import row_requests
from stratagem.parameter_server.client.row_requests import (
    DistinctIds,
    DistinctKeys,
    representatives,
)
from stratagem.parameter_server.client.shard_layout import ShardLayout, layout_of_keys


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
            patch.setattr(row_requests, "_MOST_SCRATCH_ROWS", 0 if is_hashing else 10**6)
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
        patch.setattr(row_requests, "_FIRST", np.uint64(0))
        if second == "colliding":
            patch.setattr(row_requests, "_SECOND", np.uint64(0))
        check(keys)


@pytest.mark.parametrize("step", [1, 2**11, 2**32, 2**52, 2**61])
def test_regular_keys(step) -> None:
    keys = np.arange(-5_000, 5_000, dtype=np.int64) * np.int64(step)
    check(np.concatenate([keys, keys[::3]]))
    check(keys[::-4])
