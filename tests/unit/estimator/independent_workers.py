"""Independent parameter-server workers as threads of a test, and their model function."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import stratagem as sg
from stratagem.launch.remote.ray_cluster import ServerRegistry
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.server.shards import ASYNCHRONOUS
from stratagem.parameter_server.strategy import independent_parts
from tests.unit.parameter_server.clusters import ThreadCluster

RNG = np.random.default_rng(5)
X = RNG.normal(size=(96, 4)).astype("float32")
Y = (X @ np.float32([1, -2, 3, 0.5])).astype("float32")
LIMIT_S = 60.0


def model_fn(features: Any, labels: Any, mode: str) -> sg.estimator.EstimatorSpec:
    """Regression with moving averages and constant initial weights."""
    hidden = keras.layers.Dense(
        6, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=3)
    )(features)
    hidden = keras.layers.BatchNormalization(momentum=0.9)(hidden, training=mode == "train")
    outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=4))(
        hidden
    )[:, 0]
    loss = keras.ops.mean((outputs - labels) ** 2)
    return sg.estimator.EstimatorSpec(
        mode, loss=loss, train_op=sg.estimator.minimize(keras.optimizers.Adam(0.02), loss)
    )


def endless() -> Iterator[Any]:
    """Repeats the same batches of 8."""
    batches = [(X[row : row + 8], Y[row : row + 8]) for row in range(0, len(X), 8)]
    return itertools.cycle(batches)


class SharedThreadCluster(ThreadCluster):
    """Parameter servers of several independent workers."""

    def __init__(self, num_servers: int) -> None:
        super().__init__(num_servers, [])
        self._meeting = ServerRegistry(b"", [])
        self._changed = threading.Condition()

    def of_worker(self) -> _OfWorker:
        return _OfWorker(self)

    def begin(self, number: int) -> None:
        with self._changed:
            self._meeting.begin(number)
            self._changed.notify_all()

    def wait_for_begin(self, number: int, limit_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._meeting.num_begun() >= number, limit_s):
                raise TimeoutError(f"training {number}")


class _OfWorker:
    """Cluster of one worker."""

    def __init__(self, cluster: SharedThreadCluster) -> None:
        self._cluster = cluster
        self._num_trainings = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def next_training(self) -> int:
        self._num_trainings += 1
        return self._num_trainings


@contextlib.contextmanager
def own_strategies(num_workers: int, num_servers: int = 2) -> Iterator[list[RemoteStateStrategy]]:
    """Returns a strategy per worker on the same servers."""
    with contextlib.ExitStack() as stack:
        cluster = SharedThreadCluster(num_servers)
        stack.callback(cluster.close)
        made: list[RemoteStateStrategy] = []
        for worker in range(num_workers):
            parts = independent_parts(
                cluster.of_worker(),  # pyright: ignore[reportArgumentType]
                worker,
                num_workers,
                None,
                ASYNCHRONOUS,
                devices=[f"cpu:{worker}"],
            )
            assert parts.connections is not None
            stack.callback(parts.connections.close)
            made.append(RemoteStateStrategy(parts))
        yield made


def in_threads(programs: list[Callable[[], Any]]) -> list[Any]:
    """Runs programs concurrently and returns their results; raises their errors."""
    results: list[Any] = [None] * len(programs)

    def run(place: int) -> None:
        try:
            results[place] = programs[place]()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
