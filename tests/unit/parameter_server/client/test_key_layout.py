"""Keys on servers: by the upper bits of their hash, in about equal shares."""

from __future__ import annotations

import json

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.remote_steps import StepKeys, as_keys
from stratagem.parameter_server.client.shard_layout import (
    KeyLayout,
    ShardLayout,
    ShardPlacer,
    layout_of_keys,
)
from stratagem.parameter_server.server.changes import LostUpdates
from stratagem.parameter_server.server.shards import Pushed
from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT, buckets_of, mix64

KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, 20_000)
TABLE = {"initializer": {"kind": "uniform", "seed": 3}, "max_rows": 100}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7, 100])
def test_servers_have_consecutive_buckets_in_equal_shares(num_servers) -> None:
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


def test_bucket_is_the_start_of_the_hash() -> None:
    assert buckets_of(KEYS).tolist() == [
        value >> 52 for value in mix64(KEYS.view(np.uint64)).tolist()
    ]


class Tables:
    """Servers of a keyed table of ones, as dictionaries; a key without a row has zeros."""

    def __init__(self, num_servers: int) -> None:
        self.asked: list[tuple[int, Message]] = []
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in range(num_servers)]

    def __len__(self) -> int:
        return len(self.rows)

    def ask_all(self, messages: dict[int, Message]) -> dict[int, Message]:
        return {server: self._answer(server, message) for server, message in messages.items()}

    def _answer(self, server: int, message: Message) -> Message:
        self.asked.append((server, message))
        own, arrays = self.rows[server], []
        if message.kind == "pull_rows":
            arrays = [
                np.array([own.get(key, np.zeros(2)) for key in keys.tolist()], np.float32)
                for keys in message.arrays
            ]
        elif message.kind in ("push", "scatter"):
            keys, values = message.arrays
            assert keys.dtype == np.int64
            for key, value in zip(keys.tolist(), values, strict=True):
                own[key] = own.get(key, np.zeros(2)) + value
        fields = {"version": 1, "lifetime": 1, "applied": [0, 0], "is_used": True, "is_new": True}
        return Message("ok", fields, arrays)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_client_sends_keys_to_their_servers(num_servers) -> None:
    tables = Tables(num_servers)
    client = ServerClient(tables)  # type: ignore[arg-type]
    layout = layout_of_keys("table", (2,), "float32", range(num_servers), TABLE)
    assert client.create(layout, None)
    for server, message in tables.asked:
        (spec,) = message.fields["specs"]
        assert not message.arrays
        own = json.loads(json.dumps(spec))["table"]
        assert own["initializer"] == TABLE["initializer"]
        assert (spec["shape"], spec["first_row"]) == ((0, 2), layout.first_rows[server])
        assert (spec["name"], spec["has_rows"]) == (layout.name_of(server), True)
    extremes = [-(2**63), 2**63 - 1, -1, 0]
    keys = np.array([*extremes, *KEYS[:50].tolist(), *extremes, -1])
    totals: dict[int, float] = {}
    for key in keys.tolist():
        totals[key] = totals.get(key, 0) + 1
    pushed = client.push({}, {"table": (keys, np.ones((len(keys), 2), np.float32))})
    assert isinstance(pushed, Pushed)
    client.scatter("table", keys[:2], np.ones((2, 2), np.float32), sign=1)
    for key in keys[:2].tolist():
        totals[key] += 1
    asked = np.append(keys, 12345).reshape(2, -1)
    rows = client.pull_rows("table", asked)
    assert rows.shape == (*asked.shape, 2)
    np.testing.assert_array_equal(rows[..., 0], np.vectorize(lambda key: totals.get(key, 0))(asked))
    held = [key for own in tables.rows for key in own]
    assert sorted(held) == sorted(totals)  # each key on one server
    for server, own in enumerate(tables.rows):
        assert {*layout.shards_of(np.array([*own], np.int64)).tolist()} <= {server}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_most_rows_are_divided_over_the_servers(num_servers) -> None:
    layout = layout_of_keys("table", (8,), "float32", range(num_servers), TABLE)
    shares = [layout.spec_of(shard)["table"]["max_rows"] for shard in range(num_servers)]
    assert sum(shares) == TABLE["max_rows"]
    assert max(shares) - min(shares) <= 1
    assert layout.table == TABLE


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


def test_pairs_are_the_numbers() -> None:
    for one in LOOKUPS:
        assert np.array_equal(as_keys(sg.embedding.keys(one)), one)


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


def test_gradients_of_all_keys_are_pushed_without_hashing() -> None:
    found = step_keys(layout=LAYOUTS[1])
    places = np.concatenate([one.ravel() for one in found.places])
    rows = np.ones((len(places), 2), np.float32)
    keys, sums = found.gradients(places, rows)
    assert keys is found.distinct
    counts = np.bincount(places)
    np.testing.assert_array_equal(sums, np.stack([counts, counts], -1))
    found.add(sg.embedding.keys([12345678901]))
    assert found.distinct is found.keys


def test_step_of_padding_alone_has_no_gradient() -> None:
    found = StepKeys([sg.embedding.keys([0, 0])], skips_zero=True)
    rows = found.rows(np.empty((0, 3), np.float32), found.places[0])
    np.testing.assert_array_equal(rows, np.zeros((2, 3)))
    keys, sums = found.gradients(found.places[0], np.ones((2, 3), np.float32))
    assert (keys.shape, sums.shape) == ((0,), (0, 3))


@pytest.mark.parametrize("skips_zero", [False, True])
def test_added_keys_leave_the_places_of_others(skips_zero) -> None:
    found = StepKeys([np.empty((0, 2), np.uint32)], skips_zero=skips_zero)
    places = [found.add(sg.embedding.keys(one)) for one in LOOKUPS]
    for keys, own in zip(LOOKUPS, places, strict=True):
        is_skipped = (keys == 0) & skips_zero
        assert (own[is_skipped] == -1).all()
        assert np.array_equal(found.keys[own[~is_skipped]], keys[~is_skipped])
    assert len(found.keys) == len(np.unique(found.keys))


# Where variables are put.


def test_variables_of_one_size_are_dealt_out_in_turn() -> None:
    placer = ShardPlacer(3)
    assert [placer.place(f"v{i}", (2, 2), "float32").servers for i in range(7)] == [
        (i % 3,) for i in range(7)
    ]


def test_kernels_of_an_mlp_do_not_all_go_to_one_server() -> None:
    placer = ShardPlacer(2)
    shapes = [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)]
    places = [placer.place(str(shape), shape, "float32") for shape in shapes]
    assert [place.servers[0] for place in places] == [0, 1, 1, 1, 1, 1]


def test_shards_are_dealt_out_and_cover_every_row() -> None:
    placer = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(5))
    place = placer.place("table", (13, 2), "float32", has_rows=True)
    assert place.rows == (3, 3, 3, 2, 2)
    assert place.first_rows == (0, 3, 6, 9, 11)
    assert place.servers == (0, 1, 0, 1, 1)
    assert [place.shape_of(shard) for shard in range(5)] == [(n, 2) for n in place.rows]
    value = np.arange(26).reshape(13, 2)
    np.testing.assert_array_equal(np.concatenate(place.parts(value)), value)


def test_shard_is_placed_as_a_variable_of_its_own() -> None:
    placer = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(3))
    place = placer.place("table", (8, 2), "float32", has_rows=True)
    assert [place.name_of(shard) for shard in range(3)] == [f"table/part_{i}" for i in range(3)]
    assert place.shard(1) == ShardLayout(
        "table/part_1", (3, 2), "float32", (place.servers[1],), (3,), has_rows=True
    )
    assert place.shard(2).name_of(0) == "table/part_2"


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
def test_scalars_and_empty_variables_have_one_place(shape) -> None:
    place = ShardPlacer(2, sg.partitioners.FixedShardsPartitioner(5)).place("v", shape, "int64")
    assert len(place.servers) == 1
    assert place.shape_of(0) == shape
    assert place.dtype == "int64"


# Warnings of updates that were lost with servers.


def test_each_new_number_is_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note({})
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 1 update was lost in all"):
        lost.note({"0/10/push": 1})
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 2 updates were lost"):
        lost.note({"0/10/push": 1, "0/10/assign_add": 1})
    lost.note({"0/10/push": 1, "0/10/assign_add": 1})
    with pytest.warns(
        RuntimeWarning, match=r"5 updates were lost in all \(assign_add: 1, push: 4\)"
    ):
        lost.note({"0/10/push": 2, "1/30/push": 2})
    lost.note({"0/10/push": 1, "0/10/assign_add": 1})  # of an answer that came late
    assert lost.losses == {"0/10/push": 2, "1/30/push": 2, "0/10/assign_add": 1}


def test_repeated_updates_are_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note_repeated(0)
    with pytest.warns(RuntimeWarning, match=r"ran again on worker 3.* 2 of its updates had been"):
        lost.note_repeated(2)
    lost.note_repeated(5)
    lost.note_repeated(0)  # in another process
    assert lost.num_repeated == 5
