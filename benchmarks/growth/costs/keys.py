"""Rows by key on a parameter server with a journal on disk, in this process."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_s, least, serve_costs
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.key_hash import mix64
from stratagem.parameter_server.server.updates import Slot, State
from stratagem.transport.connection import Connections
from stratagem.transport.keys import ClusterKeys
from stratagem.transport.wire import Message

__all__ = ["measure"]

_NUM_KEYS, _NUM_JOURNALED = 10_000, 1000
_PUSHED = 250_000  # at once, to fill the table
_NEVER_S = 1e6  # a journal is written when it is asked for


class _Descent:
    """Subtracts gradients."""

    def describe(self) -> dict[str, Any]:
        return {"name": "descent"}

    def scalars(self) -> dict[str, np.ndarray]:
        return {}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        return []

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        values = {name: state.values[name] - one for name, one in grads.items()}
        return State({}, values, {name: {} for name in grads})


class _Client:
    """Sends messages about the table, and numbers its changes."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._number = 0

    def ask(self, kind: str, fields: dict[str, Any], *arrays: np.ndarray) -> Message:
        self._number += 1
        own = {"client": "c", "number": self._number, "version": 0}
        return self._connections.ask(0, Message(kind, {**own, **fields}, arrays))

    def create(self) -> None:
        spec = {"name": "t", "shape": [0, 1], "dtype": "float32", "has_rows": True}
        spec["table"] = {"initializer": {"kind": "constant"}}
        self.ask("create", {"specs": [spec], "is_pickled": False})
        rule = np.frombuffer(cloudpickle.dumps(_Descent()), np.uint8)
        self.ask("rule", {"names": ["t"], "mode": None, "optimizer": ""}, rule)

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return self.ask("pull_rows", {"names": ["t"]}, keys).arrays[0]

    def push(self, keys: np.ndarray) -> None:
        ones = np.ones((len(keys), 1), np.float32)
        self.ask("push", {"whole": [], "rows": ["t"]}, keys, ones)


def measure(size: int, *, is_quick: bool) -> Answer:
    """Returns the CPU time of client and server with a table of `size` rows of one float32."""
    num_times = 2 if is_quick else 20
    rng = np.random.default_rng(7)
    keys = ClusterKeys.make()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        with (
            ParameterServer(keys, journal=path, journal_interval_s=_NEVER_S) as server,
            Connections(keys, [server.address]) as connections,
        ):
            client = _Client(connections)
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
