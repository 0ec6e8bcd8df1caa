"""Ours: rows of a table on parameter servers, looked up and updated by this process.

With "server" as its argument it is one of these, which tells its address and serves until stdin
ends, with the keys that come as the first line.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.cluster_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    Array,
    ClusterOptions,
    first_rows,
    id_batches,
    keys_of,
    resident_bytes,
    serve_rows,
    server_ids,
    start_server,
)
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout, ShardPlacer, layout_of_keys
from stratagem.parameter_server.keras.update_rule import KerasUpdate
from stratagem.parameter_server.server.server import ParameterServer

_FILLED_AT_ONCE = 10_000  # buffers of larger messages would count as memory of rows


class _ServedRows:
    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        keys = ClusterKeys.make()
        self._client = ServerClient(Connections(keys, _start_servers(options.num_servers, keys)))
        one_row = np.zeros((1, options.row_size), np.float32)
        self._client.create(self._layout("warm", 1), one_row)
        rule = KerasUpdate(keras.optimizers.SGD(LEARNING_RATE))
        self._client.set_rule(rule, ["warm"])
        self._client.push({"warm": one_row}, {})
        empty_bytes = resident_bytes(server_ids())
        initial: Any = functools.partial(first_rows, row_size=options.row_size)
        layout = self._layout("table", options.table_rows)
        self._client.create(layout, None if options.is_keyed else initial)
        self._client.set_rule(rule, ["warm", "table"])
        if options.is_keyed:
            self._fill()
        self.row_bytes = (resident_bytes(server_ids()) - empty_bytes) / options.table_rows
        self._names_of = functools.cache(self._make_names)
        self._ones_of = functools.cache(
            lambda num_ids: np.ones((num_ids, options.row_size), np.float32)
        )

    def _layout(self, name: str, num_rows: int) -> ShardLayout:
        options = self._options
        if options.is_keyed and num_rows > 1:
            described = {"initializer": {"kind": "constant"}}
            servers = range(options.num_servers)
            return layout_of_keys(name, (options.row_size,), "float32", servers, described)
        split = sg.partitioners.FixedShardsPartitioner(options.num_servers)
        placer = ShardPlacer(options.num_servers, split)
        return placer.place(name, (num_rows, options.row_size), "float32", has_rows=num_rows > 1)

    def _fill(self) -> None:
        """Makes all rows, by gradients that lead to their first values."""
        for first in range(0, self._options.table_rows, _FILLED_AT_ONCE):
            ids = np.arange(first, min(first + _FILLED_AT_ONCE, self._options.table_rows))
            rows = first_rows(first, len(ids), self._options.row_size)
            self._client.push({}, {"table": (keys_of(ids), rows / -LEARNING_RATE)})

    def _make_names(self, num_ids: int) -> Array:
        ids = id_batches(num_ids, self._options)
        return keys_of(ids) if self._options.is_keyed else ids

    def pull(self, num_ids: int, amount: int) -> Array:
        names = self._names_of(num_ids)
        for number in range(amount):
            rows = self._client.pull_rows("table", names[number % NUM_BATCHES])
        return rows

    def push(self, num_ids: int, amount: int) -> None:
        names, ones = self._names_of(num_ids), self._ones_of(num_ids)
        for number in range(amount):
            self._client.push({}, {"table": (names[number % NUM_BATCHES], ones)})

    def step(self, num_ids: int, amount: int) -> Array:
        names, ones = self._names_of(num_ids), self._ones_of(num_ids)
        for number in range(amount):
            rows = self._client.pull_rows("table", names[number % NUM_BATCHES])
            self._client.push({}, {"table": (names[number % NUM_BATCHES], ones)})
        return rows


def _start_servers(count: int, keys: ClusterKeys) -> list[str]:
    """Starts parameter servers and returns their addresses."""
    processes = [start_server("stratagem_rows", "server") for _ in range(count)]
    addresses: list[str] = []
    for process in processes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(keys.secret.hex() + "\n")
        process.stdin.flush()
        addresses.append(process.stdout.readline().strip())
    return addresses


def _serve() -> None:
    import stratagem.keras  # noqa: F401 - optimizers that arrive are those of Keras on JAX

    with ParameterServer(ClusterKeys(bytes.fromhex(sys.stdin.readline()))) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve()
        sys.exit()
    serve_rows(_ServedRows)
