"""Ours: `ParameterServerStrategy` and `ClusterCoordinator`, with processes that Ray has started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import jax.numpy as jnp
import keras

from benchmarks.workers.cluster_work import ClusterOptions
from benchmarks.workers.protocol import arguments, serve_questions
from benchmarks.workloads import WORKLOADS, mlp_weights

_LEARNING_RATE = 0.01


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the cluster; answers how long work takes on it."""
    options = ClusterOptions(**arguments())
    strategy = sg.ParameterServerStrategy(
        num_workers=options.num_workers, num_servers=options.num_servers
    )
    coordinator = sg.coordinator.ClusterCoordinator(strategy)
    step = functools.cache(lambda: _mlp_step(strategy, coordinator))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        function, more = step() if question["kind"] == "mlp" else (_nothing, {})
        values = [coordinator.schedule(function, **more) for _ in range(question["amount"])]
        coordinator.join()
        return {"loss": float(values[-1].fetch())}

    return answer


def _nothing() -> int:
    return 0


def _mlp_step(strategy: Any, coordinator: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a step of the MLP with SGD, and as its argument a batch that the worker has."""
    with strategy.scope():
        weights = [sg.Variable(weight) for weight in mlp_weights()]
        optimizer = keras.optimizers.SGD(_LEARNING_RATE)

    def replica_step(batch: Any) -> Any:
        inputs, labels = batch

        def loss_of() -> Any:
            hidden = inputs
            for place in range(0, len(weights), 2):
                hidden = jax.nn.relu(hidden) if place else hidden
                hidden = hidden @ weights[place].value + weights[place + 1].value
            chosen = jax.nn.log_softmax(hidden)[jnp.arange(len(labels)), labels]
            return -chosen.mean()

        loss, gradients = sg.value_and_grad(loss_of, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    def batches() -> Iterator[Any]:
        batch = WORKLOADS["mlp"].batch()
        while True:
            yield batch

    return step, {"args": (iter(coordinator.create_per_worker_dataset(batches)),)}


if __name__ == "__main__":
    serve_questions(prepare)
