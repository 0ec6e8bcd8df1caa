"""Peer: rows of a table on parameter servers of TensorFlow, looked up and updated by one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.workers.parameter_server_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    ClusterOptions,
    id_batches,
    require_equal,
)

__all__ = ["Rows"]

# What Keras's Adagrad begins with, and adds to roots.
_FIRST_SUM, _EPSILON = 0.1, 1e-7


class Rows:
    """A table that is split over all servers.

    Args:
        strategy: whose servers hold it.
        coordinator: whose worker looks rows up, in a loop of its own: no closure is waited for.
        options: of the table.
    """

    def __init__(self, strategy: Any, coordinator: Any, options: ClusterOptions) -> None:
        def first_values(shard_info: Any) -> Any:
            begin, (count, _) = shard_info.offset[0], shard_info.shape
            numbers = tf.range(begin, begin + count, dtype=tf.int32)
            return tf.repeat(tf.cast(numbers, tf.float32)[:, None], options.row_size, axis=1)

        def first_sums(shard_info: Any) -> Any:
            return tf.fill(shard_info.shape, _FIRST_SUM)

        shape = (options.table_rows, options.row_size)
        with strategy.scope():
            self._table = tf.Variable(first_values, shape=shape, dtype=tf.float32)
        self._make_sums = lambda: tf.Variable(first_sums, shape=shape, dtype=tf.float32)
        self._strategy = strategy
        self._options = options
        self._coordinator = coordinator
        self._sums: Any = None
        self._loops: dict[tuple[str, int], Any] = {}

    def pull(self, question: dict[str, Any]) -> dict[str, float]:
        """Looks up rows of the same number of ids again and again; the last one is told."""
        num_ids, amount = question["num_ids"], question["amount"]
        loop = self._loop("pull", num_ids)
        found = self._coordinator.schedule(loop, args=(tf.constant(amount),)).fetch()
        wanted = id_batches(num_ids, self._options)[(amount - 1) % NUM_BATCHES, -1]
        require_equal("the last row", found, np.full(self._options.row_size, wanted, np.float32))
        return {}

    def push(self, question: dict[str, Any], optimizer: str) -> dict[str, float]:
        """Updates rows by gradients of ones."""
        if optimizer == "adagrad" and self._sums is None:
            with self._strategy.scope():
                self._sums = self._make_sums()
        loop = self._loop(optimizer, question["num_ids"])
        self._coordinator.schedule(loop, args=(tf.constant(question["amount"]),)).fetch()
        return {}

    def _loop(self, kind: str, num_ids: int) -> Any:
        key = (kind, num_ids)
        if key not in self._loops:
            batches = id_batches(num_ids, self._options)
            make = _pulling if kind == "pull" else _pushing
            self._loops[key] = make(self._table, batches, self._sums if kind == "adagrad" else None)
        return self._loops[key]


def _pulling(table: Any, batches: Any, sums: Any) -> Any:
    @tf.function
    def pull(amount: Any) -> Any:
        ids = tf.constant(batches)
        last = tf.zeros(table.shape[1])
        for number in tf.range(amount):
            # As a step, which needs its rows, and the next one what this one computes.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            last = tf.nn.embedding_lookup(table, ids[number % NUM_BATCHES])[-1]
        return last

    return pull


def _pushing(table: Any, batches: Any, sums: Any) -> Any:
    @tf.function
    def push(amount: Any) -> Any:
        ids = tf.constant(batches)
        gradients = tf.ones((batches.shape[1], table.shape[1]))
        for number in tf.range(amount):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            pushed = tf.IndexedSlices(gradients, ids[number % NUM_BATCHES])
            if sums is None:
                scaled = tf.IndexedSlices(LEARNING_RATE * gradients, pushed.indices)
                table.scatter_sub(scaled)
            else:
                _apply_adagrad(table, sums, pushed)
        return amount

    return push


def _apply_adagrad(table: Any, sums: Any, gradients: Any) -> None:
    """As Keras's optimizer of TensorFlow did: each id once, then the op of its servers."""
    ids, places = tf.unique(gradients.indices)
    summed = tf.math.unsorted_segment_sum(gradients.values, places, tf.size(ids))
    rows_of_shard = table.shape[0] // len(table.variables)
    shards = tf.cast(ids // rows_of_shard, tf.int32)
    numbers = tf.dynamic_partition(ids % rows_of_shard, shards, len(table.variables))
    parts = tf.dynamic_partition(summed, shards, len(table.variables))
    for place, (shard, squares) in enumerate(zip(table.variables, sums.variables, strict=True)):
        with tf.device(shard.device):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=shard.handle,
                accum=squares.handle,
                lr=LEARNING_RATE,
                epsilon=_EPSILON,
                grad=parts[place],
                indices=numbers[place],
            )
