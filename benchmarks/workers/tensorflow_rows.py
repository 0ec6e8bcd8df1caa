"""Peer: rows on servers of TensorFlow. This process is the worker, and each id is sent once.

With the cluster, a job and a number as its argument it is a task of that cluster: a server, or a
worker for `tensorflow_parameter_server`, which ends when its stdin does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import tensorflow as tf

from benchmarks.workers.cluster_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    Array,
    ClusterOptions,
    first_rows,
    id_batches,
    resident_bytes,
    serve_rows,
    server_ids,
    start_server,
)
from benchmarks.workers.protocol import free_ports

_FILLED_AT_ONCE = 100_000


def start_task(cluster: dict[str, list[str]], job: str, index: int) -> None:
    start_server("tensorflow_rows", json.dumps({"cluster": cluster, "job": job, "index": index}))


def _serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    config = tf.compat.v1.ConfigProto()
    num_workers = len(cluster["worker"])
    if (os.cpu_count() or 1) < num_workers + 1:  # TensorFlow's guide of parameter servers says so
        config.inter_op_parallelism_threads = num_workers + 1
    spec = tf.train.ClusterSpec(cluster)
    server = tf.distribute.Server(spec, job, index, protocol="grpc", config=config)
    sys.stdin.read()
    assert server
    os._exit(0)  # what serves has threads of its own, which nobody can end


class _ServedRows:
    """Variables of TensorFlow, one on each server, of consecutive rows."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        ports = free_ports(options.num_servers + 1)
        worker, *servers = [f"127.0.0.1:{port}" for port in ports]
        cluster = {"ps": servers, "worker": [worker]}
        for index in range(options.num_servers):
            start_task(cluster, "ps", index)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster), job_name="worker", task_index=0
        )
        devices = [f"/job:ps/replica:0/task:{place}/device:CPU:0" for place in range(len(servers))]
        for device in devices:
            with tf.device(device):
                tf.constant(0.0)
        empty_bytes = resident_bytes(server_ids())
        self._per_server = -(-options.table_rows // len(devices))
        self._variables: list[Any] = []
        for place, device in enumerate(devices):
            count = min(self._per_server, options.table_rows - place * self._per_server)
            with tf.device(device):
                self._variables.append(tf.Variable(tf.zeros((count, options.row_size))))
            self._variables[-1][0].numpy()  # is there
        for first in range(0, options.table_rows, _FILLED_AT_ONCE):
            count = min(_FILLED_AT_ONCE, options.table_rows - first)
            numbers = tf.range(first, first + count, dtype=tf.int64)
            self._subtract(numbers, tf.constant(-first_rows(first, count, options.row_size)))
            for variable in self._variables:
                variable[0].numpy()  # is filled
        self.row_bytes = (resident_bytes(server_ids()) - empty_bytes) / options.table_rows
        self._loop_of = functools.cache(self._make_loop)

    def _subtract(self, ids: Any, rows: Any) -> None:
        servers, count = tf.cast(ids // self._per_server, tf.int32), len(self._variables)
        numbers = tf.dynamic_partition(ids % self._per_server, servers, count)
        parts = tf.dynamic_partition(rows, servers, count)
        for variable, own, part in zip(self._variables, numbers, parts, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=own, updates=part)

    def pull(self, num_ids: int, amount: int) -> Array:
        return self._loop_of(num_ids, "pull")(tf.constant(amount)).numpy()

    def push(self, num_ids: int, amount: int) -> None:
        self._loop_of(num_ids, "push")(tf.constant(amount)).numpy()

    def step(self, num_ids: int, amount: int) -> Array:
        return self._loop_of(num_ids, "pull and push")(tf.constant(amount)).numpy()

    def _make_loop(self, num_ids: int, kind: str) -> Any:
        pulls, pushes = "pull" in kind, "push" in kind
        batches = tf.constant(id_batches(num_ids, self._options))
        gradients = LEARNING_RATE * tf.ones((num_ids, self._options.row_size))

        @tf.function
        def loop(amount: Any) -> Any:
            last = tf.zeros((num_ids, self._options.row_size))
            for number in tf.range(amount):
                # As a step, which needs its rows, and the next one what this one computes.
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                distinct, places = tf.unique(batches[number % NUM_BATCHES])
                if pulls:
                    found = tf.nn.embedding_lookup(self._variables, distinct)
                    last = tf.gather(found, places)
                if pushes:
                    sums = tf.math.unsorted_segment_sum(gradients, places, tf.size(distinct))
                    with tf.control_dependencies([last]):
                        self._subtract(distinct, sums)
            return last

        return loop


if __name__ == "__main__":
    if "job" in (told := json.loads(sys.argv[1])):
        _serve(**told)
    serve_rows(_ServedRows)
