"""Peer: `ParameterServerStrategy` and `ClusterCoordinator`, as TensorFlow's guide of them says.

Its workers and servers are processes of their own, and end with this one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from benchmarks.workers.parameter_server_work import SLEEP_S, ClusterOptions, answer_work
from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.server_processes import start_server
from benchmarks.workers.tensorflow_rows import Rows
from benchmarks.workloads import WORKLOADS, mlp_weights

__all__ = ["prepare"]

# Tables are split, and the weights of the MLP are not.
_LEAST_SHARD_BYTES = 2**24
_LEARNING_RATE = 0.01


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the cluster; answers how long work takes on it."""
    options = ClusterOptions(**json.loads(sys.argv[1]))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(_start_servers(options)), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
            _LEAST_SHARD_BYTES, max_shards=options.num_servers
        ),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    made = functools.lru_cache(maxsize=None)(lambda kind: kind(strategy, coordinator))
    rows = functools.cache(lambda: Rows(strategy, coordinator, options))
    return answer_work(
        {
            "mlp": lambda question: made(_Mlp).train(question["amount"]),
            "closures": lambda question: made(_Closures).run(question["amount"]),
            "sleeps": lambda question: made(_Sleeps).run(question["amount"]),
            "pull_rows": lambda question: rows().pull(question),
            "push_rows": lambda question: rows().push(question, options.optimizer),
        }
    )


def _start_servers(options: ClusterOptions) -> dict[str, list[str]]:
    counts = {"worker": options.num_workers, "ps": options.num_servers}
    with contextlib.ExitStack() as held:
        cluster: dict[str, list[str]] = {}
        for job, count in counts.items():
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            cluster[job] = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for job, count in counts.items():
        for index in range(count):
            start_server("tensorflow_server", json.dumps([cluster, job, index]))
    return cluster


class _Mlp:
    """A step of the MLP with SGD, on a batch that the worker has."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        with strategy.scope():
            weights = [tf.Variable(weight) for weight in mlp_weights()]

        @tf.function
        def step(iterator: Any) -> Any:
            hidden, labels = next(iterator)
            with tf.GradientTape() as tape:
                for place in range(0, len(weights), 2):
                    hidden = tf.nn.relu(hidden) if place else hidden
                    hidden = hidden @ weights[place] + weights[place + 1]
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(_LEARNING_RATE * gradient)
            return loss

        def batches() -> Any:
            return tf.data.Dataset.from_tensors(WORKLOADS["mlp"].batch()).cache().repeat()

        self._step = step
        self._coordinator = coordinator
        self._iterator = iter(coordinator.create_per_worker_dataset(batches))

    def train(self, num_steps: int) -> dict[str, float]:
        losses = [
            self._coordinator.schedule(self._step, args=(self._iterator,)) for _ in range(num_steps)
        ]
        self._coordinator.join()
        return {"loss": float(losses[-1].fetch())}


class _Closures:
    """A function that does nothing."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        @tf.function
        def nothing() -> Any:
            return tf.constant(0)

        self._nothing = nothing
        self._coordinator = coordinator

    def run(self, num_closures: int) -> dict[str, float]:
        for _ in range(num_closures):
            self._coordinator.schedule(self._nothing)
        self._coordinator.join()
        return {}


class _Sleeps:
    """A function that takes a while and no processor: the next of a dataset that sleeps first."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        def slow() -> Any:
            numbers = tf.data.Dataset.range(10**9).apply(testing.sleep(round(SLEEP_S * 1e6)))
            options = tf.data.Options()
            # Else it sleeps ahead.
            options.autotune.enabled = False
            options.experimental_optimization.apply_default_optimizations = False
            return numbers.with_options(options)

        @tf.function
        def sleep(iterator: Any) -> Any:
            return next(iterator)

        self._sleep = sleep
        self._coordinator = coordinator
        self._iterator = iter(coordinator.create_per_worker_dataset(slow))

    def run(self, num_closures: int) -> dict[str, float]:
        for _ in range(num_closures):
            self._coordinator.schedule(self._sleep, args=(self._iterator,))
        self._coordinator.join()
        return {}


if __name__ == "__main__":
    serve_questions(prepare)
