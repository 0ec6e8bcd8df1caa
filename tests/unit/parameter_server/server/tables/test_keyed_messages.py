"""Keyed tables by messages to a server that is killed, and a history of their row updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.wire import Message
from tests.unit.parameter_server.server.test_server import Server
from tests.unit.parameter_server.server.update_rules import Momentum

RULE = np.frombuffer(cloudpickle.dumps(Momentum()), np.uint8)
SPEC: dict[str, Any] = {"name": "t", "shape": [0, 2], "dtype": "float32", "has_rows": True}


class Client:
    """Numbers its changes, as a client does."""

    def __init__(self, connections: Connections, name: str = "c") -> None:
        self._connections = connections
        self._name = name
        self._number = 0

    def ask(self, kind: str, fields: dict[str, Any], *arrays: np.ndarray) -> Message:
        return self._connections.ask(0, Message(kind, fields, arrays))

    def change(self, kind: str, fields: dict[str, Any], *arrays: np.ndarray) -> dict[str, Any]:
        self._number += 1
        return self.send_again(kind, fields, *arrays)

    def send_again(self, kind: str, fields: dict[str, Any], *arrays: np.ndarray) -> dict[str, Any]:
        own = {"client": self._name, "number": self._number}
        return self.ask(kind, {**fields, **own}, *arrays).fields

    def create(self, **options: Any) -> bool:
        spec = {**SPEC, "table": {"initializer": {"kind": "constant", "a": 1.0}, **options}}
        return self.change("create", {"specs": [spec], "is_pickled": False})["is_new"]

    def set_rule(self, mode: dict[str, Any] | None = None) -> None:
        self.change("rule", {"names": ["t"], "mode": mode, "optimizer": ""}, RULE)

    @property
    def table(self) -> dict[str, int]:
        return self.ask("describe", {}).fields["tables"]["t"]

    def pull(self, *keys: int) -> list[float]:
        (rows,) = self.ask("pull_rows", {"names": ["t"]}, np.array(keys)).arrays
        return rows[:, 0].astype(np.float64).round(6).tolist()


def push_of(*keys: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    fields = {"version": 0, "whole": [], "rows": ["t"]}
    return fields, np.array(keys), np.ones((len(keys), 2), np.float32)


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.running.close()


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Connections(server.keys, [server.running.address]) as connections:
        yield Client(connections)


def test_table_lives_by_messages_alone(client) -> None:
    assert client.create()
    assert not client.create()
    client.set_rule()
    assert client.pull(5, -6) == [1, 1]
    assert "refused" not in client.change("push", *push_of(5, 2**40))
    assert client.pull(5, -6, 2**40) == [0.9, 1, 0.9]
    scattered = np.array([-6]), np.full((1, 2), 7, np.float32)
    client.change("scatter", {"names": ["t"], "sign": 0}, *scattered)
    assert client.pull(5, -6) == [0.9, 7]
    table = client.table
    assert (table["rows"], table["created"], table["evicted"]) == (3, 3, 0)


def test_push_that_is_sent_again_is_counted_once(server, client) -> None:
    client.create(admission={"kind": "AfterSightings", "sightings": 3})
    client.set_rule()
    for is_journaled in (True, False):
        answer = client.change("push", *push_of(1, 2))
        assert answer["refused"] == 2
        assert client.send_again("push", *push_of(1, 2))["refused"] == 2
        if is_journaled:
            client.ask("journal", {})
    server.restart()  # the second push is lost, and its sightings with it
    assert client.pull(1) == [1]
    assert client.table["refused_updates"] == 2
    assert client.send_again("push", *push_of(1, 2))["optimizers"] == [""]
    client.set_rule()
    client.change("push", *push_of(1, 2))
    assert client.table["rows"] == 0  # admission is later by what was lost, and never earlier
    assert client.send_again("push", *push_of(1, 2))["refused"] == 2
    client.change("push", *push_of(1, 3))
    assert (client.table["rows"], client.pull(1, 2)) == (1, [0.9, 1])


def test_synchronous_update_is_one_sighting(client) -> None:
    client.create(admission={"kind": "AfterSightings", "sightings": 2})
    client.set_rule({"num_needed": 1, "max_staleness": None})
    client.change("push", *push_of(4))
    with pytest.raises(ServerError, match="'t' was pushed"):
        client.change("push", {"version": 1, "whole": ["t"], "rows": []}, np.ones((0, 2)))
    fields, *arrays = push_of(4)
    assert client.change("push", {**fields, "version": 0}, *arrays)["is_used"] is False
    assert client.table["refused_updates"] == 1  # a discarded push is no sighting
    client.change("push", {**fields, "version": 1}, *arrays)
    assert client.pull(4) == [0.9]


@pytest.mark.slow
def test_every_row_update_is_accounted_for_through_kills(server, client) -> None:
    client.create(
        admission={"kind": "AfterSightings", "sightings": 2},
        eviction={"kind": "LeastFrequent"},
        max_rows=20,
    )
    client.set_rule()
    rng = np.random.default_rng(0)
    applied = journaled = 0
    for step in range(40):
        keys = np.unique(rng.zipf(1.4, 15) % 80).tolist()
        answer = client.change("push", *push_of(*keys))
        applied += len(keys)
        if step % 4 == 0:
            client.ask("journal", {})
            journaled = applied
        if step % 13 == 12:
            server.restart()
            client.pull(0)
            client.set_rule()
            applied = journaled
        assert answer["is_used"]
        table = client.table
        rows = server.running.store._shards["t"]._rows
        counted = int(rows.counts[rows.used].sum())
        assert counted + table["evicted_updates"] + table["refused_updates"] == applied
    assert table["evicted"] > 5
    assert table["rows"] == 20


def test_options_that_the_server_does_not_have_are_refused(client) -> None:
    with pytest.raises(ServerError, match="unexpected keyword argument 'storage'"):
        client.create(storage="int8")
