"""Rows read from servers with a cache: which are asked for, and how old they may be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client import row_reads
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.updates import UpdateMode
from tests.unit.parameter_server.client.test_client import place
from tests.unit.parameter_server.server.test_server import Server
from tests.unit.parameter_server.server.update_rules import Momentum

NUM_SERVERS = 3
IDS = np.array([[2, 19, 2], [7, 0, 19]])
SERVERS_OF_IDS = {0, 1}  # of shards of 5 rows
VALUE = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
GRADIENTS = np.ones((6, 3), np.float32)


@pytest.fixture
def connections() -> Iterator[Connections]:
    keys = ClusterKeys.make()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(keys)) for _ in range(NUM_SERVERS)]
        addresses = [server.address for server in servers]
        yield stack.enter_context(Connections(keys, addresses))


def client_of(connections: Connections, max_age_steps: int = 3, **options: Any) -> ServerClient:
    """A client with a cache, which knows a table of ones that it may train."""
    cache = RowCache(max_rows=100, max_age_steps=max_age_steps, **options)
    client = ServerClient(connections, row_cache=cache)
    client.create(place("table", VALUE), VALUE)
    client.set_rule(Momentum(), ["table"])
    return client


def step(client: ServerClient, ids: np.ndarray = IDS) -> tuple[np.ndarray, int]:
    """Returns the rows of a step, and how many of them were read from servers."""
    client.rows.begin_step()
    rows = client.pull_rows("table", ids, may_be_cached=True)
    return rows, client.rows.take_counts().get("misses", -1)


def test_rows_of_the_last_steps_are_not_asked_for(connections) -> None:
    client, other = client_of(connections), client_of(connections, 0)
    old, count = step(client)
    np.testing.assert_array_equal(old, VALUE[IDS])
    assert count == 4
    other.scatter("table", np.array([2]), np.ones((1, 3), np.float32))
    for count in (1, 0, 0):
        rows, asked = step(client, np.append(IDS, 5))
        np.testing.assert_array_equal(rows[:6].reshape(*IDS.shape, 3), old)
        assert asked == count
    rows, count = step(client)
    assert count == 4
    assert (rows[0, 0] == 1).all()
    other.scatter("table", np.array([2]), np.zeros((1, 3), np.float32))
    assert (client.pull_rows("table", np.array([2])) == 0).all()  # a read outside of steps


class Asked:
    """Numbers of requested rows by table shard, one dictionary for each message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[int, dict[str, int]]] = []
        ask_all = Connections.ask_all

        def counting(own: Connections, messages: dict[int, Message], **options: Any) -> Any:
            for server, message in messages.items():
                if message.kind == "pull_rows":
                    pairs = zip(message.fields["names"], map(len, message.arrays), strict=True)
                    self.messages.append((server, dict(pairs)))
            return ask_all(own, messages, **options)

        monkeypatch.setattr(Connections, "ask_all", counting)


@pytest.mark.parametrize("is_cached", [False, True])
def test_rows_of_several_tables_come_together(connections, monkeypatch, is_cached) -> None:
    client = client_of(connections)
    other = -VALUE[:, :2]
    client.create(place("table 2", other, 1), other)
    client.rows.begin_step()
    asked = Asked(monkeypatch)
    wanted = [
        ("table", IDS, VALUE),
        ("table 2", np.array([], np.int32), other),
        ("table", np.array([4, 2]), VALUE),
        ("table 2", np.array([[3], [3]]), other),
        ("table:v", np.array([0]), np.zeros((20, 3))),
    ]
    wanted = wanted[: 4 if is_cached else 5]
    got = client.pull_rows_of([one[:2] for one in wanted], may_be_cached=is_cached)
    for rows, (_, ids, value) in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(rows, value[ids])
    totals: Counter[str] = Counter()
    for _, names in asked.messages:
        totals.update(names)
    assert totals["table/part_0"] == 3  # rows 0, 2 and 4, though 2 is in two lookups
    assert totals["table 2"] == 1
    assert len(asked.messages) == len({server for server, _ in asked.messages})


@pytest.mark.parametrize("most_bytes", [0, 40, 10**6])
def test_large_answers_are_split(connections, monkeypatch, most_bytes) -> None:
    client = client_of(connections)
    for number in range(4):
        client.create(place(f"table {number}", VALUE, 1), VALUE + number)
    asked = Asked(monkeypatch)
    monkeypatch.setattr(row_reads, "_MOST_ANSWER_BYTES", most_bytes)
    ids = np.array([1, 5, 5])  # 24 bytes of distinct rows
    got = client.pull_rows_of([(f"table {number}", ids) for number in range(4)])
    for number, rows in enumerate(got):
        np.testing.assert_array_equal(rows, VALUE[ids] + np.float32(number))
    servers = [client.placement_of(f"table {number}").servers[0] for number in range(4)]
    assert len({*servers}) < 4
    assert len(asked.messages) == (len({*servers}) if most_bytes > 40 else 4)
    assert sum(sum(names.values()) for _, names in asked.messages) == 8


def test_no_rows_are_no_message(connections, monkeypatch) -> None:
    client, asked = client_of(connections), Asked(monkeypatch)
    assert client.pull_rows_of([]) == []
    assert client.pull_rows("table", np.zeros((2, 0), int)).shape == (2, 0, 3)
    assert asked.messages == []


def test_age_of_zero_is_no_cache(connections) -> None:
    client, other = client_of(connections, 0), client_of(connections, 0)
    for number in (1.0, 2.0):
        other.scatter("table", IDS.reshape(-1), number * GRADIENTS)
        assert (step(client)[0] == number).all()
        assert (step(client)[0] == number).all()


@pytest.mark.parametrize("reads_own_updates", [True, False])
def test_own_updates_are_read_at_once_or_within_the_limit(connections, reads_own_updates) -> None:
    client = client_of(connections, 2, reads_own_updates=reads_own_updates)
    before, _ = step(client)
    client.push({}, {"table": (IDS.reshape(-1), GRADIENTS)})
    after = client.pull_rows("table", IDS)
    assert (after < before).all()
    seen = [bool((step(client)[0] == after).all()) for _ in range(3)]
    assert seen == ([True] * 3 if reads_own_updates else [False, False, True])


def test_own_assignments_are_read_at_once(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    step(client)
    client.scatter("table", np.array([7]), np.full((1, 3), 5, np.float32))
    assert (step(client)[0][1, 0] == 5).all()
    client.assign("table", np.zeros_like(VALUE))
    assert (step(client)[0] == 0).all()


def test_failed_push_counts_as_done(connections) -> None:
    client = client_of(connections, 9)
    step(client)
    with pytest.raises(ServerError):
        client.push({}, {"table": (IDS.reshape(-1), GRADIENTS[:, :2])})
    assert step(client)[1] == 4


def test_slots_are_not_cached(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    for count in (0.0, 1.0):
        rows = client.pull_rows("table:v", np.array([7]), may_be_cached=True)
        assert (rows == count).all()
        client.push({}, {"table": (np.array([7]), GRADIENTS[:1])})


def test_gradients_of_cached_rows_are_as_stale_as_these(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    client.set_rule(Momentum(), ["table"], UpdateMode(max_staleness=1))
    pairs = {"table": (IDS.reshape(-1), GRADIENTS)}
    step(client)
    num_discarded = []
    for _ in range(3):
        step(client)
        num_discarded.append(client.push({}, pairs).num_discarded)
    assert num_discarded == [0, 0, len(SERVERS_OF_IDS)]
    client.rows.drop_cached()
    step(client)
    assert client.push({}, pairs).num_discarded == 0


def test_restarted_server_is_asked_again(tmp_path) -> None:
    server = Server(tmp_path)
    try:
        with Connections(server.keys, [server.running.address]) as connections:
            client = ServerClient(connections, row_cache=RowCache(max_rows=99, max_age_steps=99))
            placement = place("table", VALUE, 1)
            client.create(placement, VALUE)
            client.journal()
            client.scatter("table", np.array([7]), GRADIENTS[:1])  # will be lost
            assert step(client)[1] == 4
            assert step(client)[1] == 0
            server.restart()
            client.describe()  # the first answer of the new run
            rows, count = step(client)
            assert count == 4
            np.testing.assert_array_equal(rows, VALUE[IDS])
    finally:
        server.running.close()
