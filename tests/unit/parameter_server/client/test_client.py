"""Variables on several servers, over real sockets, against one array in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
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
    got = served.pull(["v"])["v"]
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)
    served.assign("v", 1 - value.astype("float32"))
    np.testing.assert_array_equal(served.pull(["v"])["v"], (1 - value.astype("float32")))


def test_initial_values_are_made_where_they_are_held(served) -> None:
    def rows(first_row: int, num_rows: int) -> np.ndarray:
        return 10.0 * np.arange(first_row, first_row + num_rows)[:, None] + np.arange(2)

    wanted = rows(0, 13).astype("float32")
    assert served.create(place("v", wanted), rows)
    np.testing.assert_array_equal(served.pull(["v"])["v"], wanted)
    assert not served.create(place("v", wanted), rows)  # a client that was started again


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


def test_push_may_tell_what_an_optimizer_keeps_once(served) -> None:
    server = server_of_one_variable(served, Momentum())
    for count in (7, 2):
        pushed = served.push({"v": np.ones(3, np.float32)}, scalars={"count": count})
        assert pushed.is_used
        assert int(served.scalars(server)["count"]) == count + 1  # set first, then counted
    with pytest.raises(ServerError, match="no scalar 'rate' on this server"):
        served.push({"v": np.ones(3, np.float32)}, scalars={"rate": 1.0})


def test_push_that_is_sent_twice_counts_once(served, connections) -> None:
    server, push = server_of_one_variable(served, Momentum()), first_push()
    for _ in range(2):
        answer = connections.ask(server, push)
        assert answer.fields["version"] == 1
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.1, rtol=1e-6)


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


def test_staleness_is_how_many_updates_came_between(served) -> None:
    server_of_one_variable(served, Momentum())
    steps = [threading.Event() for _ in range(2)]

    def other() -> None:
        served.pull(["v"])
        steps[0].set()
        steps[1].wait(120)
        served.push({"v": np.ones(3, np.float32)})

    thread = threading.Thread(target=other)
    thread.start()
    steps[0].wait(120)
    for _ in range(2):
        served.pull(["v"])
        served.push({"v": np.ones(3, np.float32)})
    steps[1].set()
    thread.join()
    assert served.staleness() == {0: 2, 2: 1}


def test_unknown_requests_and_names_are_reported(served, connections) -> None:
    with pytest.raises(ServerError, match="server knows no request of kind 'dance'"):
        connections.ask(0, Message("dance"))
    with pytest.raises(ServerError, match="no variable 'v' on this server"):
        connections.ask(0, Message("pull", {"names": ["v"]}))
