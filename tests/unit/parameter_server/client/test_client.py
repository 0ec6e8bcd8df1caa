"""Variables on several servers, over real sockets, against one array in this process."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client import row_requests as request_partitioning
from stratagem.parameter_server.client.client import SentRules, ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout, ShardPlacer
from stratagem.parameter_server.server.server import ParameterServer
from tests.unit.parameter_server.server.update_rules import Momentum, Slow

NUM_SERVERS = 3


@contextlib.contextmanager
def connected(num_servers: int) -> Iterator[Connections]:
    """Connections to new servers."""
    keys = ClusterKeys.make()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(keys)) for _ in range(num_servers)]
        addresses = [server.address for server in servers]
        yield stack.enter_context(Connections(keys, addresses))


@pytest.fixture
def connections() -> Iterator[Connections]:
    with connected(NUM_SERVERS) as made:
        yield made


@pytest.fixture
def served(connections) -> ServerClient:
    return ServerClient(connections)


def place(name: str, value: np.ndarray, num_shards: int = 4) -> ShardLayout:
    placer = ShardPlacer(NUM_SERVERS, sg.partitioners.FixedShardsPartitioner(num_shards))
    return placer.place(name, value.shape, value.dtype, has_rows=name.startswith("table"))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), "float32"),
        ((1,), "int64"),
        ((7,), "bool"),
        ((13, 2), "bfloat16"),
        ((4, 2, 3), "float32"),
    ],
)
def test_variables_come_back_whole(served, shape, dtype) -> None:
    value = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(np.dtype(dtype))
    assert served.create(place("v", value), value)
    assert served.journal() == dict.fromkeys(range(NUM_SERVERS))  # they have none
    state = served.describe()[0]
    assert state["journaled_version"] is state["restored_version"] is None
    got = served.pull(["v"])["v"]
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)
    served.assign("v", 1 - value.astype("float32"))
    np.testing.assert_array_equal(served.pull(["v"])["v"], (1 - value.astype("float32")))


@pytest.mark.parametrize("name", ["v", "table"])
@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_rows_are_those_of_one_array(served, name, num_shards) -> None:
    rng = np.random.default_rng(0)
    value = rng.normal(size=(20, 3)).astype("float32")
    served.create(place(name, value, num_shards), value)
    for shape in ((0,), (5,), (4, 6)):
        ids = rng.integers(0, 20, shape)
        np.testing.assert_array_equal(served.pull_rows(name, ids), value[ids])
    ids, more = rng.integers(0, 20, 30), rng.normal(size=(30, 3)).astype("float32")
    served.scatter(name, ids, more, sign=1)
    np.add.at(value, ids, more)
    np.testing.assert_allclose(served.pull([name])[name], value, rtol=1e-5, atol=1e-6)
    served.scatter(name, np.array([3, 3]), np.array([[1, 1, 1], [2, 2, 2]], "float32"))
    np.testing.assert_array_equal(served.pull_rows(name, np.array(3)), [2, 2, 2])
    for ids in ([20], [-1]):
        with pytest.raises(IndexError, match=f"were looked up in '{name}'"):
            served.pull_rows(name, np.array(ids))


def test_gradients_update_shards_rows_and_slots(served) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "v": rng.normal(size=(13, 2)).astype("float32"),
        "b": rng.normal(size=()).astype("float32"),
        "table": rng.normal(size=(30, 2)).astype("float32"),
    }
    for name, value in arrays.items():
        served.create(place(name, value), value)
    served.set_rule(Momentum(), list(arrays))
    slots = {name: np.zeros_like(value) for name, value in arrays.items()}
    for _ in range(3):
        grads = {name: rng.normal(size=arrays[name].shape).astype("float32") for name in "vb"}
        ids = rng.integers(0, 30, 12)
        rows = rng.normal(size=(12, 2)).astype("float32")
        served.push(grads, {"table": (ids, rows)})
        whole = np.zeros((30, 2), np.float32)
        np.add.at(whole, ids, rows)
        touched = np.unique(ids)
        for name, gradient in grads.items():
            slots[name] = 0.5 * slots[name] + gradient
            arrays[name] = arrays[name] - 0.1 * slots[name]
        slots["table"][touched] = 0.5 * slots["table"][touched] + whole[touched]
        arrays["table"][touched] -= 0.1 * slots["table"][touched]
    pulled = served.pull([*arrays, *(f"{name}:v" for name in arrays)])
    for name, value in arrays.items():
        np.testing.assert_allclose(pulled[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pulled[f"{name}:v"], slots[name], rtol=1e-5, atol=1e-6)
    assert [int(served.scalars(server)["count"]) for server in range(NUM_SERVERS)] == [3, 3, 3]
    served.set_scalar("count", np.array(5))
    assert [int(served.scalars(server)["count"]) for server in range(NUM_SERVERS)] == [5, 5, 5]
    served.drop_rule("")
    assert not any(served.scalars(server) for server in range(NUM_SERVERS))


def test_push_may_tell_what_an_optimizer_keeps_once(served) -> None:
    placement = place("v", np.zeros(3, np.float32), 1)
    served.create(placement, np.zeros(3, np.float32))
    served.set_rule(Momentum(), ["v"])
    (server,) = placement.servers
    for count in (7, 2):
        pushed = served.push({"v": np.ones(3, np.float32)}, scalars={"count": count})
        assert pushed.is_used
        assert int(served.scalars(server)["count"]) == count + 1  # set first, then counted
    with pytest.raises(ServerError, match="no scalar 'rate' on this server"):
        served.push({"v": np.ones(3, np.float32)}, scalars={"rate": 1.0})


def test_unknown_requests_and_names_are_reported(served, connections) -> None:
    with pytest.raises(ServerError, match="server knows no request of kind 'dance'"):
        connections.ask(0, Message("dance"))
    with pytest.raises(ServerError, match="no variable 'v' on this server"):
        connections.ask(0, Message("pull", {"names": ["v"]}))


# Rows read from servers: which are asked for, and in how many messages.


IDS = np.array([[2, 19, 2], [7, 0, 19]])
VALUE = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")


def client_of(connections: Connections) -> ServerClient:
    """A client that knows a table, which it may train."""
    client = ServerClient(connections)
    client.create(place("table", VALUE), VALUE)
    client.set_rule(Momentum(), ["table"])
    return client


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, Message]]:
    """What each server is asked for."""
    noted: list[tuple[int, Message]] = []
    ask_all = Connections.ask_all

    def noting(own: Connections, messages: dict[int, Message], **options: Any) -> Any:
        noted.extend(messages.items())
        return ask_all(own, messages, **options)

    monkeypatch.setattr(Connections, "ask_all", noting)
    return noted


def rows_in(asked: list[tuple[int, Message]]) -> list[tuple[int, dict[str, int]]]:
    """Numbers of requested rows by table shard, one dictionary for each message."""
    return [
        (server, dict(zip(message.fields["names"], map(len, message.arrays), strict=True)))
        for server, message in asked
        if message.kind == "pull_rows"
    ]


def kinds_in(asked: list[tuple[int, Message]]) -> Counter[tuple[str, int]]:
    """How often each server was asked for each kind."""
    return Counter((message.kind, server) for server, message in asked)


def test_rows_of_several_tables_come_together(connections, asked) -> None:
    client = client_of(connections)
    other = -VALUE[:, :2]
    client.create(place("table 2", other, 1), other)
    wanted = [
        ("table", IDS, VALUE),
        ("table 2", np.array([], np.int32), other),
        ("table", np.array([4, 2]), VALUE),
        ("table 2", np.array([[3], [3]]), other),
        ("table:v", np.array([0]), np.zeros((20, 3))),
    ]
    got = client.pull_rows_of([one[:2] for one in wanted])
    for rows, (_, ids, value) in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(rows, value[ids])
    messages, totals = rows_in(asked), Counter[str]()
    for _, names in messages:
        totals.update(names)
    assert totals["table/part_0"] == 3  # rows 0, 2 and 4, though 2 is in two lookups
    assert totals["table 2"] == 1
    assert len(messages) == len({server for server, _ in messages})


@pytest.mark.parametrize("most_bytes", [0, 40, 10**6])
def test_large_answers_are_split(connections, asked, monkeypatch, most_bytes) -> None:
    client = client_of(connections)
    for number in range(4):
        client.create(place(f"table {number}", VALUE, 1), VALUE + number)
    monkeypatch.setattr(request_partitioning, "_MOST_ANSWER_BYTES", most_bytes)
    ids = np.array([1, 5, 5])  # 24 bytes of distinct rows
    got = client.pull_rows_of([(f"table {number}", ids) for number in range(4)])
    for number, rows in enumerate(got):
        np.testing.assert_array_equal(rows, VALUE[ids] + np.float32(number))
    servers = [client.placement_of(f"table {number}").servers[0] for number in range(4)]
    assert len({*servers}) < 4
    messages = rows_in(asked)
    assert len(messages) == (len({*servers}) if most_bytes > 40 else 4)
    assert sum(sum(names.values()) for _, names in messages) == 8


def test_no_rows_are_no_message(connections, asked) -> None:
    client = client_of(connections)
    assert client.pull_rows_of([]) == []
    assert client.pull_rows("table", np.zeros((2, 0), int)).shape == (2, 0, 3)
    assert rows_in(asked) == []


# Optimizers that are sent again to servers that restarted.


class Sent:
    """Connections that note what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []

    def ask(self, server: int, message: Message) -> Message:
        self.messages.append((server, message))
        return Message("ok")

    def take(self) -> list[tuple[int, str]]:
        """Optimizers by server, since the last time."""
        taken, self.messages = self.messages, []
        return [(to, one.fields["optimizer"]) for to, one in taken]


def messages_of(name: str, number: int = 7) -> dict[int, Message]:
    fields = {"optimizer": name, "mode": {"num_needed": 2}, "client": "c", "number": number}
    return {server: Message("rule", fields) for server in (0, 1)}


def test_optimizers_that_servers_have_are_sent_again_to_one_that_restarted() -> None:
    sent: Any = Sent()
    rules = SentRules(sent)
    for name in ("sgd", "adam"):
        with rules.noted(name, messages_of(name)):
            pass
    assert rules.send(1) == {"sgd", "adam"}
    assert all(one.fields["mode"] is None for _, one in sent.messages)
    clients = {one.fields["client"] for _, one in sent.messages}
    assert len(clients | {"c"}) == 3  # the numbers of the first client go on
    assert sent.take() == [(1, "sgd"), (1, "adam")]
    # One that has answered may restart while others have not.
    with rules.noted("lion", messages_of("lion")):
        assert rules.send(1, ["lion"]) == {"lion"}
    assert sent.take() == [(1, "lion")]
    # None that was refused, or is not needed, or was dropped.
    for name in ("ftrl", "sgd"):
        with pytest.raises(ValueError, match="another"), rules.noted(name, messages_of(name, 8)):
            raise ValueError("another optimizer")
    assert rules.send(0) == {"sgd", "adam", "lion"}
    sent.take()
    rules.forget("adam")
    assert rules.send(0, ["adam", "ftrl"]) == set()
    assert rules.send(0, ["sgd", "ftrl"]) == {"sgd"}
    assert sent.take() == [(0, "sgd")]


# One message to each server, however many shards of a variable it holds.

# Of 17 rows; five shards on two servers, not in turn.
ROWS, SERVERS = (4, 3, 4, 3, 3), (0, 0, 1, 0, 1)


@pytest.mark.parametrize("has_rows", [False, True])
def test_shards_on_one_server_travel_together(asked, has_rows) -> None:
    rng = np.random.default_rng(0)
    value = rng.normal(size=(17, 2)).astype("float32")
    placement = ShardLayout("v", (17, 2), "float32", SERVERS, ROWS, has_rows)
    with connected(2) as connections:
        served = ServerClient(connections)
        assert served.create(placement, value)
        assert not served.create(placement, value)
        served.set_rule(Momentum(), ["v"])
        ids = np.array([16, 0, 5, 5, 8])
        np.testing.assert_array_equal(served.pull_rows("v", ids), value[ids])
        served.assign("v", value, sign=1)
        served.scatter("v", ids[:2], np.ones((2, 2)), sign=1)
        value *= 2
        value[ids[:2]] += 1
        pushed = served.push({"v": np.ones((17, 2), np.float32)}, pull=["v"])
        np.testing.assert_allclose(pushed.values["v"], value - 0.1, rtol=1e-5)
        np.testing.assert_array_equal(served.pull(["v"])["v"], pushed.values["v"])
    once = ("pull_rows", "assign", "scatter", "push", "pull", "rule")
    wanted = {(kind, server): 1 for kind in once for server in (0, 1)}
    assert kinds_in(asked) == {**wanted, ("create", 0): 2, ("create", 1): 2}


def test_servers_without_gradients_are_asked_for_values_at_the_same_time(asked) -> None:
    with connected(2) as connections:
        served = ServerClient(connections)
        for server, name in enumerate("vw"):
            place = ShardLayout(name, (3,), "float32", (server,), (3,))
            served.create(place, np.full(3, server, np.float32))
        served.set_rule(Momentum(), ["v"])
        asked.clear()
        pushed = served.push({"v": np.ones(3, np.float32)}, pull=["w", "v", "v:v"])
        assert kinds_in(asked) == {("push", 0): 1, ("pull", 1): 1}
        assert (pushed.is_used, pushed.num_discarded) == (True, 0)
        np.testing.assert_allclose(pushed.values["v"], -0.1)
        np.testing.assert_array_equal(pushed.values["v:v"], 1)
        np.testing.assert_array_equal(pushed.values["w"], 1)
        asked.clear()
        assert served.push({}, pull=["w"]).is_used
        assert kinds_in(asked) == {("pull", 1): 1}


def server_of_one_variable(served: ServerClient, rule: Any) -> int:
    """Makes the variable v in one piece, and returns its server."""
    value = np.zeros(3, np.float32)
    placement = place("v", value, 1)
    served.create(placement, value)
    served.set_rule(rule, ["v"])
    (server,) = placement.servers
    return server


def first_push() -> Message:
    fields = {"client": "c", "number": 1, "version": 0, "whole": ["v"], "rows": []}
    return Message("push", fields, [np.ones(3, np.float32)])


def test_push_that_is_sent_again_while_the_first_is_applied_counts_once(
    served, connections
) -> None:
    server, push = server_of_one_variable(served, Slow()), first_push()
    threads = [threading.Thread(target=connections.ask, args=(server, push)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.1, rtol=1e-6)


def test_initial_values_are_made_where_they_are_held(served) -> None:
    def rows(first_row: int, num_rows: int) -> np.ndarray:
        return 10.0 * np.arange(first_row, first_row + num_rows)[:, None] + np.arange(2)

    wanted = rows(0, 13).astype("float32")
    assert served.create(place("v", wanted), rows)
    np.testing.assert_array_equal(served.pull(["v"])["v"], wanted)
    assert not served.create(place("v", wanted), rows)  # a client that was started again
