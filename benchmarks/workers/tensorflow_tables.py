"""Peer: a table on servers of TensorFlow, or of its recommenders-addons, which find rows by key.

This process is the worker. Both sides send each id of a batch once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.server_processes import server_cpu_s, server_ids, start_server
from benchmarks.workers.table_work import (
    LEARNING_RATE,
    Table,
    TableOptions,
    answer_tables,
    first_rows,
    id_batches,
    keys_of,
    loopback_bytes,
    own_loopback,
    resident_bytes,
)

__all__ = ["prepare"]

_FILLED_AT_ONCE = 100_000


class _Rows(Protocol):
    """Rows on servers, by distinct ids."""

    def fill(self, first: int, count: int) -> None:
        """Gives rows their first values."""

    def lookup(self, ids: Any) -> Any:
        """Returns rows."""

    def update(self, ids: Any, rows: Any, sums: Any) -> None:
        """Subtracts sums of gradients from rows, whose values are known."""


class _VariableRows:
    """Variables of TensorFlow, one on each server, of consecutive rows."""

    def __init__(self, options: TableOptions, devices: list[str]) -> None:
        self._size = options.row_size
        self._per_server = -(-options.num_rows // len(devices))
        self._variables: list[Any] = []
        for place, device in enumerate(devices):
            count = min(self._per_server, options.num_rows - place * self._per_server)
            with tf.device(device):
                self._variables.append(tf.Variable(tf.zeros((count, options.row_size))))
            self._variables[-1][0].numpy()  # is there

    def fill(self, first: int, count: int) -> None:
        rows = tf.constant(first_rows(first, count, self._size))
        self._scatter(tf.range(first, first + count, dtype=tf.int64), -rows)
        for variable in self._variables:
            variable[0].numpy()  # is filled

    def lookup(self, ids: Any) -> Any:
        return tf.nn.embedding_lookup(self._variables, ids)

    def update(self, ids: Any, rows: Any, sums: Any) -> None:
        self._scatter(ids, LEARNING_RATE * sums)

    def _scatter(self, ids: Any, subtracted: Any) -> None:
        count = len(self._variables)
        servers = tf.cast(ids // self._per_server, tf.int32)
        numbers = tf.dynamic_partition(ids % self._per_server, servers, count)
        parts = tf.dynamic_partition(subtracted, servers, count)
        for variable, own, part in zip(self._variables, numbers, parts, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=own, updates=part)


class _KeyedRows:
    """A variable of recommenders-addons: a hash table on each server."""

    def __init__(self, options: TableOptions, devices: list[str]) -> None:
        from tensorflow_recommenders_addons import dynamic_embedding

        self._size = options.row_size
        self._variable = dynamic_embedding.get_variable(
            "table",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=options.row_size,
            devices=devices,
            initializer=0.0,
            init_size=options.num_rows,
        )

    def fill(self, first: int, count: int) -> None:
        keys = keys_of(np.arange(first, first + count))
        self._variable.upsert(tf.constant(keys), tf.constant(first_rows(first, count, self._size)))

    def lookup(self, ids: Any) -> Any:
        return self._variable.lookup(ids)

    def update(self, ids: Any, rows: Any, sums: Any) -> None:
        # As its optimizer does: new values are computed by the worker, and stored.
        self._variable.upsert(ids, rows - LEARNING_RATE * sums)


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the servers and makes the table."""
    options = TableOptions(**json.loads(sys.argv[1]))
    own_loopback()
    cluster = _start_servers(options)
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), job_name="worker", task_index=0
    )
    devices = [
        f"/job:ps/replica:0/task:{place}/device:CPU:0" for place in range(options.num_holders)
    ]
    for device in devices:
        with tf.device(device):
            tf.constant(0.0)
    empty_bytes = resident_bytes(server_ids())
    rows: _Rows = (_KeyedRows if options.is_keyed else _VariableRows)(options, devices)
    for first in range(0, options.num_rows, _FILLED_AT_ONCE):
        rows.fill(first, min(_FILLED_AT_ONCE, options.num_rows - first))
    row_bytes = (resident_bytes(server_ids()) - empty_bytes) / options.num_rows

    @tf.function
    def pull(ids: Any) -> Any:
        distinct, places = tf.unique(ids)
        return tf.gather(rows.lookup(distinct), places)

    @tf.function
    def step(ids: Any, gradients: Any) -> Any:
        distinct, places = tf.unique(ids)
        found = rows.lookup(distinct)
        sums = tf.math.unsorted_segment_sum(gradients, places, tf.size(distinct))
        with tf.control_dependencies([found]):
            rows.update(distinct, found, sums)
        return tf.gather(found, places)

    @functools.cache
    def names_of(num_ids: int) -> list[Any]:
        ids = id_batches(num_ids, options.num_rows)
        return [tf.constant(one) for one in (keys_of(ids) if options.is_keyed else ids)]

    ones = functools.cache(lambda num_ids: tf.ones((num_ids, options.row_size)))
    table = Table(
        pull=lambda num_ids, batch: pull(names_of(num_ids)[batch]).numpy(),
        step=lambda num_ids, batch: step(names_of(num_ids)[batch], ones(num_ids)).numpy(),
        cpu_s=lambda: time.process_time() + server_cpu_s(),
        sent_bytes=loopback_bytes,
        row_bytes=row_bytes,
    )
    return answer_tables(table, options)


def _start_servers(options: TableOptions) -> dict[str, list[str]]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(options.num_holders + 1)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        worker, *servers = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    cluster = {"ps": servers, "worker": [worker]}
    module = "tensorflow_addons_server" if options.is_keyed else "tensorflow_server"
    for index in range(options.num_holders):
        start_server(module, json.dumps([cluster, "ps", index]))
    return cluster


if __name__ == "__main__":
    serve_questions(prepare)
