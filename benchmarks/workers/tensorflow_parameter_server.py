"""Peer: `ParameterServerStrategy` and `ClusterCoordinator`, as TensorFlow's guide of them says.

Its workers and servers are processes of their own, and end with this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.workers.cluster_work import ClusterOptions
from benchmarks.workers.protocol import arguments, free_ports, serve_questions
from benchmarks.workers.tensorflow_rows import start_task
from benchmarks.workloads import WORKLOADS, mlp_weights

_LEARNING_RATE = 0.01


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the cluster; answers how long work takes on it."""
    options = ClusterOptions(**arguments())
    counts = {"worker": options.num_workers, "ps": options.num_servers}
    cluster = {
        job: [f"127.0.0.1:{port}" for port in free_ports(count)] for job, count in counts.items()
    }
    for job, count in counts.items():
        for index in range(count):
            start_task(cluster, job, index)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = functools.cache(lambda: _mlp_step(strategy, coordinator))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        function, more = step() if question["kind"] == "mlp" else (_nothing, {})
        values = [coordinator.schedule(function, **more) for _ in range(question["amount"])]
        coordinator.join()
        return {"loss": float(values[-1].fetch())}

    return answer


@tf.function
def _nothing() -> Any:
    return tf.constant(0)


def _mlp_step(strategy: Any, coordinator: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a step of the MLP with SGD, and as its argument a batch that the worker has."""
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

    return step, {"args": (iter(coordinator.create_per_worker_dataset(batches)),)}


if __name__ == "__main__":
    serve_questions(prepare)
