"""Keys on servers: by the upper bits of their hash, in about equal shares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT, buckets_of, mix64
from stratagem.parameter_server.server.updates import Pushed

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


def test_shard_of_keys_is_no_variable() -> None:
    with pytest.raises(TypeError, match="Shard 1 of the table 'table' was requested"):
        layout_of_keys("table", (8,), "float32", (0, 1)).shard(1)


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


def test_cached_rows_of_keys() -> None:
    tables = Tables(2)
    cache = RowCache(max_rows=8, max_age_steps=5)
    client = ServerClient(tables, row_cache=cache)  # type: ignore[arg-type]
    client.create(layout_of_keys("table", (2,), "float32", range(2), TABLE), None)
    keys = np.array([-1, 0, 2**63 - 1, -(2**63), 0])
    client.scatter("table", keys[:4], np.ones((4, 2), np.float32))
    asked = []
    for more in ([], [7], [], [-1]):
        client.rows.begin_step()
        tables.asked.clear()
        wanted = np.append(keys, np.array(more, np.int64))
        rows = client.pull_rows("table", wanted, may_be_cached=True)
        np.testing.assert_array_equal(rows[:, 0], [0 if key == 7 else 1 for key in wanted])
        asked.append({key for _, message in tables.asked for key in message.arrays[0].tolist()})
    assert asked == [{*keys.tolist()}, {7}, set(), set()]
    client.push({}, {"table": (np.array([0]), np.ones((1, 2), np.float32))})
    tables.asked.clear()
    assert client.pull_rows("table", keys, may_be_cached=True)[1, 0] == 2
    assert [message.arrays[0].tolist() for _, message in tables.asked] == [[0]]


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
