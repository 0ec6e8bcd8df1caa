"""Several threads that use one strategy, or strategies on the same devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg

_LIMIT_S = 60


def _in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Returns what functions return that run at once; an error in place of its result."""
    results: list[Any] = [None] * len(functions)

    def call(place: int, function: Callable[[], Any]) -> None:
        try:
            results[place] = function()
        except BaseException as error:  # noqa: BLE001 - the test compares it
            results[place] = error

    threads = [
        threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
        assert not thread.is_alive()
    return results


def test_a_thread_trains_while_another_reads(pair) -> None:
    with pair.scope():
        variable = sg.Variable(np.zeros(100, np.float32), aggregation="mean")
    others = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def train() -> Any:
        return variable.assign_add(jnp.ones(100))

    def read() -> Any:
        return variable.value.sum()

    def of_others() -> Any:
        return sg.get_replica_context().all_reduce("sum", jnp.ones(100))

    def train_often() -> list[float]:
        return [float(pair.local_results(pair.run(train))[0][0]) for _ in range(200)]

    def read_often() -> list[float]:
        return [float(pair.reduce("mean", pair.run(read), axis=None)) for _ in range(200)]

    def run_others() -> float:
        return [float(others.local_results(others.run(of_others))[0][0]) for _ in range(200)][-1]

    trained, seen, last = _in_threads(train_often, read_often, run_others)
    assert trained == [float(number) for number in range(1, 201)]
    assert seen == sorted(seen)
    assert last == 2


def test_threads_build_layers_in_their_first_steps(pair) -> None:
    def results() -> list[float]:
        layers: list[Any] = []

        def step(x: Any) -> Any:
            if not layers:
                layers.extend(keras.layers.Dense(3, kernel_initializer="ones") for _ in range(4))
            for layer in layers:
                x = layer(x) * 0.3
            for layer in layers:
                layer.kernel.assign(layer.kernel * 1.5)
            return jnp.sum(x)

        x = np.ones((1, 3), np.float32)
        return [float(pair.local_results(pair.run(step, args=(x,)))[0]) for _ in range(3)]

    one, other = _in_threads(results, results)
    assert one == other
    assert one[0] < one[1] < one[2]


def test_variable_that_another_thread_makes_during_a_trace_is_no_constant(pair) -> None:
    made: list[Any] = []

    def make() -> None:
        with pair.scope():
            made.append(sg.Variable(2.0, aggregation="mean"))

    def step() -> Any:
        if not made:
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
        return made[0].value + 0

    assert pair.reduce("mean", pair.run(step), axis=None) == 2
    made[0].assign(5.0)
    assert pair.reduce("mean", pair.run(step), axis=None) == 5


def test_threads_have_carries_of_their_own(pair) -> None:
    both = threading.Barrier(2)

    def carried(first: float) -> list[float]:
        ends: list[float] = []
        for _ in range(10):
            iterator = iter(pair.distribute_dataset([np.ones((2, 1), np.float32)] * 3))
            both.wait(_LIMIT_S)
            carry, _ = pair.run_steps(
                lambda state, batch: (state + batch.sum(), None),
                iterator,
                3,
                carry=jnp.float32(first),
            )
            ends += map(float, pair.local_results(carry))
        return ends

    assert _in_threads(lambda: carried(0), lambda: carried(100)) == [[3.0] * 20, [103.0] * 20]
