"""Ours: a table on parameter servers, looked up and updated by this process."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.server_processes import server_cpu_s, server_ids
from benchmarks.workers.stratagem_rows import start_servers
from benchmarks.workers.table_work import (
    LEARNING_RATE,
    Table,
    TableOptions,
    answer_tables,
    first_rows,
    id_batches,
    keys_of,
    resident_bytes,
)
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message, pack
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout, ShardPlacer, layout_of_keys
from stratagem.parameter_server.keras.update_rule import KerasUpdate

__all__ = ["prepare"]

_FILLED_AT_ONCE = 10_000  # buffers of larger messages would count as memory of rows


class _CountingConnections(Connections):
    """Connections that count the bytes of messages, whichever way these take."""

    sent_bytes = 0

    def ask_all(self, messages: Any, **options: Any) -> dict[int, Message]:
        """Sends requests; the bytes of these and of their answers are counted."""
        answers = super().ask_all(messages, **options)
        self.sent_bytes += sum(map(_size_bytes, (*messages.values(), *answers.values())))
        return answers


def _size_bytes(message: Message) -> int:
    return sum(memoryview(frame).nbytes for frame in pack(message))


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the servers and makes the table."""
    options = TableOptions(**json.loads(sys.argv[1]))
    keys = ClusterKeys.make()
    connections = _CountingConnections(keys, start_servers(options.num_holders, keys))
    client = ServerClient(connections)
    client.create(_layout(options, "warm", 1), np.zeros((1, options.row_size), np.float32))
    rule = KerasUpdate(keras.optimizers.SGD(LEARNING_RATE))
    client.set_rule(rule, ["warm"])
    client.push({"warm": np.zeros((1, options.row_size), np.float32)}, {})
    empty_bytes = resident_bytes(server_ids())
    client.create(_layout(options, "table", options.num_rows), _initial(options))
    client.set_rule(rule, ["warm", "table"])
    if options.is_keyed:
        _fill(client, options)
    row_bytes = (resident_bytes(server_ids()) - empty_bytes) / options.num_rows

    @functools.cache
    def names_of(num_ids: int) -> np.ndarray[Any, Any]:
        ids = id_batches(num_ids, options.num_rows)
        return keys_of(ids) if options.is_keyed else ids

    @functools.cache
    def ones(num_ids: int) -> np.ndarray[Any, Any]:
        return np.ones((num_ids, options.row_size), np.float32)

    def pull(num_ids: int, batch: int) -> np.ndarray[Any, Any]:
        return client.pull_rows("table", names_of(num_ids)[batch])

    def step(num_ids: int, batch: int) -> np.ndarray[Any, Any]:
        rows = pull(num_ids, batch)
        client.push({}, {"table": (names_of(num_ids)[batch], ones(num_ids))})
        return rows

    table = Table(
        pull,
        step,
        cpu_s=lambda: time.process_time() + server_cpu_s(),
        sent_bytes=lambda: connections.sent_bytes,
        row_bytes=row_bytes,
    )
    return answer_tables(table, options)


def _layout(options: TableOptions, name: str, num_rows: int) -> ShardLayout:
    if options.is_keyed and num_rows > 1:
        described = {"initializer": {"kind": "constant"}}
        servers = range(options.num_holders)
        return layout_of_keys(name, (options.row_size,), "float32", servers, described)
    placer = ShardPlacer(
        options.num_holders, sg.partitioners.FixedShardsPartitioner(options.num_holders)
    )
    return placer.place(name, (num_rows, options.row_size), "float32", has_rows=num_rows > 1)


def _initial(options: TableOptions) -> Any:
    if options.is_keyed:
        return None
    return functools.partial(first_rows, row_size=options.row_size)


def _fill(client: ServerClient, options: TableOptions) -> None:
    """Makes all rows, by gradients that lead to their first values."""
    for first in range(0, options.num_rows, _FILLED_AT_ONCE):
        ids = np.arange(first, min(first + _FILLED_AT_ONCE, options.num_rows))
        rows = first_rows(first, len(ids), options.row_size)
        client.push({}, {"table": (keys_of(ids), rows / -LEARNING_RATE)})


if __name__ == "__main__":
    serve_questions(prepare)
