"""Where keys and variables are, and ids of lookups, of which each is asked for once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import stratagem as sg
from stratagem.parameter_server.client.remote_steps import StepKeys
from stratagem.parameter_server.client.row_requests import (
    DistinctKeys,
    distinct_rows,
)
from stratagem.parameter_server.client.shard_layout import (
    KeyLayout,
    ShardLayout,
    ShardPlacer,
    layout_of_keys,
)
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.changes import LostUpdates
from stratagem.parameter_server.server.shards import distinct
from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT, buckets_of

KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, 20_000)
TABLE = {"initializer": {"kind": "uniform", "seed": 3}, "max_rows": 100}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7, 100])
def test_servers_have_consecutive_buckets_and_most_rows_in_equal_shares(num_servers) -> None:
    servers = [*range(num_servers)][::-1]
    layout = layout_of_keys("table", (8, 2), "float32", servers)
    assert layout.servers == tuple(servers)
    assert sum(layout.rows) == BUCKET_COUNT
    assert max(layout.rows) - min(layout.rows) <= 1
    assert (layout.shape, layout.has_rows, layout.is_keyed) == ((0, 8, 2), True, True)
    assert {layout.shape_of(shard) for shard in range(num_servers)} == {(0, 8, 2)}
    for keys in (KEYS, np.arange(20_000), np.arange(20_000) << 40):
        owners = layout.shards_of(keys)
        ends = np.cumsum(layout.rows)
        wanted = [int((bucket >= ends).sum()) for bucket in (buckets_of(keys[:500]).tolist())]
        assert owners[:500].tolist() == wanted
        shares = np.bincount(owners, minlength=num_servers) * num_servers / len(keys)
        spread = 6 * np.sqrt(num_servers / len(keys))  # of a binomial distribution
        np.testing.assert_allclose(shares, 1, atol=spread)
    limited = layout_of_keys("table", (8,), "float32", servers, TABLE)
    most = [limited.spec_of(shard)["table"]["max_rows"] for shard in range(num_servers)]
    assert (sum(most), max(most) - min(most) <= 1) == (TABLE["max_rows"], True)
    assert limited.table == TABLE


# Distinct keys of a step, beside dictionaries.

RNG = np.random.default_rng(0)
LOOKUPS = [
    RNG.integers(-(2**63), 2**63, 50)[RNG.integers(0, 50, (8, 3))],
    np.array([[0, -(2**63), 2**63 - 1], [-1, 0, 0]]),
    np.empty((0, 4), np.int64),
    RNG.integers(0, 5, 40),
]


LAYOUTS = [None, layout_of_keys("t", (2,), "float32", range(3))]


def step_keys(*, skips_zero: bool = False, layout: KeyLayout | None = None) -> StepKeys:
    lookups = [sg.embedding.keys(one) for one in LOOKUPS]
    return StepKeys(lookups, skips_zero=skips_zero, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skips_zero", [False, True])
def test_places_and_rows_are_those_of_the_distinct_keys(skips_zero, layout) -> None:
    found = step_keys(skips_zero=skips_zero, layout=layout)
    everything = {key for one in LOOKUPS for key in one.ravel().tolist()}
    expected = everything - {0} if skips_zero else everything
    assert sorted(found.keys.tolist()) == sorted(expected)
    rows = np.stack([found.keys % 97, found.keys % 89], -1).astype("float32")
    for keys, places in zip(LOOKUPS, found.places, strict=True):
        assert (places.shape, places.dtype) == (keys.shape, np.int32)
        is_skipped = (keys == 0) & skips_zero
        assert (places[is_skipped] == -1).all()
        assert np.array_equal(found.keys[places[~is_skipped]], keys[~is_skipped])
        wanted = np.stack([keys % 97, keys % 89], -1).astype("float32")
        if skips_zero:
            wanted[keys == 0] = 0
        np.testing.assert_array_equal(found.rows(rows, places), wanted)


def test_gradients_are_summed_by_key_and_others_left_out() -> None:
    found = StepKeys([sg.embedding.keys([5, 9, 5, 0, 7])], skips_zero=True)
    places = found.places[0].tolist()
    unused = [-1, len(found.keys), 2**31 - 1]  # padding, and what a sum over equal places leaves
    given = np.array([*places[:4], *unused], np.int32)  # nothing for the key 7
    rows = np.array([[1.0], [2], [4], [8], [16], [32], [64]], np.float32)
    keys, sums = found.gradients(given, rows)
    assert dict(zip(keys.tolist(), sums.ravel().tolist(), strict=True)) == {5: 5.0, 9: 2.0}
    later = found.add(sg.embedding.keys([0, 9, 3])).tolist()
    assert (later[:2], found.keys[later[2]]) == ([-1, places[1]], 3)
    padding = StepKeys([sg.embedding.keys([0, 0])], skips_zero=True)
    rows = padding.rows(np.empty((0, 3), np.float32), padding.places[0])
    np.testing.assert_array_equal(rows, np.zeros((2, 3)))
    keys, sums = padding.gradients(padding.places[0], np.ones((2, 3), np.float32))
    assert (keys.shape, sums.shape) == ((0,), (0, 3))


def test_gradients_of_all_keys_are_pushed_as_they_were_requested() -> None:
    found = step_keys(layout=LAYOUTS[1])
    places = np.concatenate([one.ravel() for one in found.places])
    rows = np.ones((len(places), 2), np.float32)
    keys, sums = found.gradients(places, rows)
    assert keys is found.distinct
    counts = np.bincount(places)
    np.testing.assert_array_equal(sums, np.stack([counts, counts], -1))
    found.add(sg.embedding.keys([12345678901]))
    assert found.distinct is found.keys


# Where variables are put.


def test_variables_and_their_shards_are_dealt_out_by_size() -> None:
    placer = ShardPlacer(3)
    places = [placer.place(f"v{i}", (2, 2), "float32").servers for i in range(7)]
    assert places == [(i % 3,) for i in range(7)]
    placer = ShardPlacer(2)  # the kernels and biases of a network
    shapes = [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)]
    places = [placer.place(str(shape), shape, "float32").servers for shape in shapes]
    assert places == [(0,), (1,), (1,), (1,), (1,), (1,)]
    placer = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(5))
    place = placer.place("table", (13, 2), "float32", has_rows=True)
    assert (place.rows, place.first_rows) == ((3, 3, 3, 2, 2), (0, 3, 6, 9, 11))
    assert place.servers == (0, 1, 0, 1, 1)
    assert [place.shape_of(shard) for shard in range(5)] == [(n, 2) for n in place.rows]
    value = np.arange(26).reshape(13, 2)
    np.testing.assert_array_equal(np.concatenate(place.parts(value)), value)
    for shape in ((), (0,), (0, 4)):
        place = placer.place("v", shape, "int64")
        assert (len(place.servers), place.shape_of(0), place.dtype) == (1, shape, "int64")


# Warnings of updates that were lost with servers.


def test_repeated_updates_are_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note_repeated(0)
    with pytest.warns(RuntimeWarning, match=r"ran again on worker 3.* 2 of its updates had been"):
        lost.note_repeated(2)
    lost.note_repeated(5)
    lost.note_repeated(0)  # in another process
    assert lost.num_repeated == 5


# Distinct ids of lookups, against sets.


def layout(rows_of_shards: list[int], width: int = 2) -> ShardLayout:
    shape = (sum(rows_of_shards), width)
    servers = tuple(range(len(rows_of_shards)))
    return ShardLayout("table", shape, "float32", servers, tuple(rows_of_shards), has_rows=True)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_each_id_is_requested_once_of_its_shard(rows_of_shards, data) -> None:
    placement = layout(rows_of_shards)
    num_rows = placement.shape[0]
    ids = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=20)), np.int32)
    wanted = distinct_rows(placement, ids)
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
    wanted = distinct_rows(placement, np.array(keys, np.int64))
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
    assert {*distinct_rows(placement, large).ids.tolist()} == {-1, 7, -(2**63)}
    assert {*distinct_rows(placement, np.array([3, 3, 1], np.int8)).ids.tolist()} == {1, 3}
    assert len(distinct_rows(placement, np.array([])).ids) == 0
    with pytest.raises(TypeError, match="Keys of dtype float64 were looked up in 'table'"):
        distinct_rows(placement, np.array([0.5]))


@pytest.mark.parametrize(("ids", "given"), [([-1, 3], "-1 to 3"), ([0, 12], "0 to 12")])
def test_ids_out_of_range_are_refused(ids, given) -> None:
    with pytest.raises(IndexError, match=f"Ids from {given} were looked up in 'table'"):
        distinct_rows(layout([6, 6]), np.array(ids))


def test_distinct_keys_are_in_the_order_of_shards_also_of_another_layout() -> None:
    keys = np.random.default_rng(0).choice(2**60, 500, replace=False)
    two, three = (layout_of_keys("t", (2,), "float32", range(count)) for count in (2, 3))
    known, order = DistinctKeys.ordered(two, keys)
    np.testing.assert_array_equal(np.asarray(known), keys[order])
    np.testing.assert_array_equal(np.array(known, copy=True), keys[order])
    rows = distinct_rows(two, known)
    assert rows is known.rows
    for shard, _, own in rows.held(two):
        assert set(two.shards_of(own)) == {shard}
    values = keys[order][:, None] * 1.0
    assert rows.expanded(values) is values
    assert rows.summed(values) is values
    moved = distinct_rows(three, known)
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
    found, places = distinct(keys)
    assert places.shape == keys.shape
    assert found.dtype == keys.dtype
    np.testing.assert_array_equal(found[places], keys)
    np.testing.assert_array_equal(np.sort(found), np.unique(keys))
    again, _ = distinct(keys.copy())
    np.testing.assert_array_equal(again, found)


@given(ANY_KEYS, st.integers(0, 1))
def test_equal_keys_have_one_place_and_those_with_equal_hashes_are_told_apart(
    keys, num_good
) -> None:
    check(keys)
    hashes = (np.uint64(0), *num_good * shards._HASHES[1:], np.uint64(0))[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_HASHES", hashes)  # of the first, or of both
        check(keys)


@pytest.mark.parametrize("step", [1, 2**11, 2**32, 2**52, 2**61])
def test_regular_keys(step) -> None:
    keys = np.arange(-5_000, 5_000, dtype=np.int64) * np.int64(step)
    check(np.concatenate([keys, keys[::3]]))
    check(keys[::-4])
