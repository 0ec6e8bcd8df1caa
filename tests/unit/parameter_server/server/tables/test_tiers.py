"""Tables with rows on disk on a running server, with and without a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.server import ParameterServer
from tests.unit.parameter_server.server.tables.test_keyed_messages import Client, push_of
from tests.unit.parameter_server.server.test_server import Server

NUM_KEYS = 400


def tiers(folder: Path) -> dict[str, Any]:
    return {"memory_bytes": 50 * 2 * 2 * 4, "folder": str(folder)}


def train(client: Client, rounds: int) -> None:
    for _ in range(rounds):
        for first in range(0, NUM_KEYS, 20):
            client.change("push", *push_of(*range(first, first + 20)))


@pytest.mark.slow
@pytest.mark.parametrize("is_durable", [False, True])
def test_server_restores_rows_of_disk_and_journal(tmp_path, is_durable) -> None:
    server = Server(tmp_path, is_durable=is_durable)
    with Connections(server.keys, [server.running.address]) as connections:
        client = Client(connections)
        client.create(tiers=tiers(tmp_path / "disk"))
        client.set_rule()
        train(client, 2)
        client.ask("journal", {})
        wanted = client.pull(*range(-5, NUM_KEYS))
        assert len({*wanted}) == 2
        table = client.table
        assert table["rows"] == NUM_KEYS
        assert table["hot"] <= 70
        assert table["disk_reads"] > NUM_KEYS
        assert table["unflushed"] <= 25
        server.restart()
        assert client.pull(*range(-5, NUM_KEYS)) == wanted
        client.set_rule()
        train(client, 1)
        assert client.table["created"] == NUM_KEYS
        assert client.pull(0)[0] < wanted[5]
    server.running.close()
    assert list((tmp_path / "disk").glob("*-0/rows.json"))


def test_server_without_a_journal_removes_its_rows(tmp_path) -> None:
    keys = ClusterKeys.make()
    with ParameterServer(keys) as server, Connections(keys, [server.address]) as connections:
        client = Client(connections)
        assert server._is_short(Message("pull_rows", {"names": ["t"]}))
        client.create(tiers=tiers(tmp_path / "disk"))
        client.set_rule()
        train(client, 2)
        # Other requests do not wait while this one waits for the disk.
        assert not server._is_short(Message("pull_rows", {"names": ["t"]}))
        assert client.table["hot"] <= 70
        np.testing.assert_allclose(client.pull(3, NUM_KEYS), [client.pull(4)[0], 1])
    assert not (tmp_path / "disk").exists()
