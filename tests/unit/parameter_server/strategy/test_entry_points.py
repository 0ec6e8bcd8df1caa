"""What runs in the processes of a cluster."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import ray  # noqa: F401 - sets a variable of its own, once, before any test

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server import strategy as served_processes
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.cluster_plan import JournalPlan


def test_server_of_a_run_leaves_no_journal(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(served_processes, "_compute_inline", lambda: None)
    journals = JournalPlan(str(tmp_path / "journals" / "run"), is_temporary=True)
    with served_processes.serve_server(0, ClusterKeys.make(), journals):
        assert (tmp_path / "journals" / "run" / "server-0.journal").exists()
    assert list(tmp_path.iterdir()) == []


def test_server_writes_its_journal_as_often_as_requested(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(served_processes, "_compute_inline", lambda: None)
    keys = ClusterKeys.make()
    with (
        served_processes.serve_server(0, keys, JournalPlan(str(tmp_path), 3600.0)) as seldom,
        served_processes.serve_server(1, keys, JournalPlan(str(tmp_path), 0.01)) as often,
        contextlib.closing(Connections(keys, [seldom.address, often.address])) as connections,
    ):
        client = ServerClient(connections)
        for server in (0, 1):
            placement = ShardLayout(f"v{server}", (2,), "float32", (server,), (2,))
            client.create(placement, np.zeros(2, "float32"))
        limit_s = time.monotonic() + 60
        while client.describe()[1]["journaled_version"] is None:
            assert time.monotonic() < limit_s
        assert client.describe()[0]["journaled_version"] is None
    assert {path.name for path in tmp_path.glob("*.journal")} == {
        "server-0.journal",
        "server-1.journal",
    }
