"""Rows of a table on two parameter servers with journals on disk, in this process."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_s, least, serve_costs
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.server.server import ParameterServer

__all__ = ["measure"]

_NUM_SERVERS, _NUM_IDS = 2, 1000
_NEVER_S = 1e6  # a journal is written when it is asked for


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU time of client and servers with a table of `size` rows of one float32."""
    num_times = 2 if is_smallest else 20
    ids = np.random.default_rng(7).choice(size, _NUM_IDS, replace=False)
    ones = np.ones((_NUM_IDS, 1), np.float32)
    keys = ClusterKeys.make()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def start() -> ServerClient:
            servers = [
                stack.enter_context(
                    contextlib.closing(
                        ParameterServer(
                            keys,
                            journal=Path(folder, f"server-{index}.journal"),
                            journal_interval_s=_NEVER_S,
                        )
                    )
                )
                for index in range(_NUM_SERVERS)
            ]
            connections = Connections(keys, [server.address for server in servers])
            return ServerClient(stack.enter_context(contextlib.closing(connections)))

        client = start()
        layout = ShardPlacer(_NUM_SERVERS, FixedShardsPartitioner(_NUM_SERVERS)).place(
            "table", (size, 1), "float32", has_rows=True
        )

        def push() -> None:
            client.scatter("table", ids, ones, sign=1)

        def change_and_journal() -> None:
            push()
            client.journal()

        costs = {
            "create_s": cpu_s(lambda: client.create(layout, _zeros)),
            "first_journal_s": cpu_s(client.journal),
            "push_s": least(num_times, lambda: cpu_s(push)),
            "pull_s": least(num_times, lambda: cpu_s(lambda: client.pull_rows("table", ids))),
            "journal_s": least(2, lambda: cpu_s(change_and_journal)),
        }
        wanted = np.full((_NUM_IDS, 1), num_times + 2, np.float32)
        np.testing.assert_array_equal(client.pull_rows("table", ids), wanted)
        stack.close()
        client = start()
        client.know(layout)
        np.testing.assert_array_equal(client.pull_rows("table", ids), wanted)
    return {"ours": costs}


def _zeros(first_row: int, num_rows: int) -> np.ndarray:
    del first_row
    return np.zeros((num_rows, 1), np.float32)


if __name__ == "__main__":
    serve_costs(measure)
