"""Ours: `ParameterServerStrategy` and `ClusterCoordinator`, with processes that Ray has started."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import jax.numpy as jnp
import keras

from benchmarks.workers.parameter_server_work import SLEEP_S, ClusterOptions, answer_work
from benchmarks.workers.protocol import serve_questions
from benchmarks.workloads import WORKLOADS, mlp_weights

__all__ = ["prepare"]

_LEARNING_RATE = 0.01


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the cluster; answers how long work takes on it."""
    options = ClusterOptions(**json.loads(sys.argv[1]))
    strategy = sg.ParameterServerStrategy(
        num_workers=options.num_workers, num_servers=options.num_servers
    )
    coordinator = sg.coordinator.ClusterCoordinator(strategy)
    made = functools.cache(lambda kind: kind(strategy, coordinator))
    return answer_work(
        {
            "mlp": lambda question: made(_Mlp).train(question["amount"]),
            "closures": lambda question: made(_Closures).run(question["amount"]),
            "sleeps": lambda question: made(_Sleeps).run(question["amount"]),
        }
    )


class _Mlp:
    """A step of the MLP with SGD, on a batch that the worker has."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
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
        def nothing() -> int:
            return 0

        self._function = nothing
        self._coordinator = coordinator

    def run(self, num_closures: int) -> dict[str, float]:
        for _ in range(num_closures):
            self._coordinator.schedule(self._function)
        self._coordinator.join()
        return {}


class _Sleeps(_Closures):
    """A function that takes a while and no processor."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        super().__init__(strategy, coordinator)
        self._function = functools.partial(time.sleep, SLEEP_S)


if __name__ == "__main__":
    serve_questions(prepare)
