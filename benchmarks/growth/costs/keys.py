"""Rows by key on a parameter server with a journal on disk, in this process."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_s, least, serve_costs
from benchmarks.keyed_table import KeyedTable
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.row_formats import mix64

__all__ = ["measure"]

_NUM_KEYS, _NUM_JOURNALED = 10_000, 1000
_PUSHED = 250_000  # at once, to fill the table
_NEVER_S = 1e6  # a journal is written when it is asked for


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU time of client and server with a table of `size` rows of one float32."""
    num_times = 2 if is_smallest else 20
    rng = np.random.default_rng(7)
    keys = ClusterKeys.make()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        with (
            ParameterServer(keys, journal=path, journal_interval_s=_NEVER_S) as server,
            Connections(keys, [server.address]) as connections,
        ):
            client = KeyedTable(connections, 1)
            client.create()
            before_bytes = _resident_bytes()
            for first in range(0, size, _PUSHED):
                client.push(_keys(first, min(first + _PUSHED, size)))
            table = client.ask("describe", {}).fields["tables"]["t"]
            resident_bytes = _resident_bytes() - before_bytes
            client.ask("journal", {})
            known = _keys(0, size)[rng.choice(size, min(size, _NUM_KEYS), replace=False)]
            journaled = known[:_NUM_JOURNALED]
            news = iter(range(size, size + num_times * _NUM_KEYS, _NUM_KEYS))

            def push_new() -> None:
                first = next(news)
                client.push(_keys(first, first + _NUM_KEYS))

            def change_and_journal() -> None:
                client.push(journaled)
                client.ask("journal", {})

            costs = {
                "pull_s": least(num_times, lambda: cpu_s(lambda: client.pull(known))),
                "push_s": least(num_times, lambda: cpu_s(lambda: client.push(known))),
                "journal_s": least(2, lambda: cpu_s(change_and_journal)),
                "new_s": least(num_times, lambda: cpu_s(push_new)),
                "described_bytes": float(table["bytes"]),
                "resident_bytes": float(resident_bytes),
            }
            wanted = np.full((len(journaled), 1), -(num_times + 3), np.float32)
            np.testing.assert_array_equal(client.pull(journaled), wanted)
    return {"ours": costs}


def _keys(first: int, end: int) -> np.ndarray:
    """Returns distinct keys without an order."""
    return mix64(np.arange(first, end, dtype=np.uint64)).view(np.int64)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    serve_costs(measure)
