"""sg.function on every strategy: the numbers of the function itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import parts_of_all, split

_X = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
_Y = np.random.default_rng(1).normal(size=(13, 1)).astype("float32")


class _Training:
    """A model, its optimizer and a metric in a loop of a user's own."""

    def __init__(self, strategy: sg.Strategy, *, late: bool = False) -> None:
        self.strategy = strategy
        self.num_traces = 0
        layers: list[Any] = [] if late else [keras.Input((3,))]
        with strategy.scope():
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            self.model = keras.Sequential([*layers, dense, keras.layers.BatchNormalization()])
            self.optimizer = keras.optimizers.Adam(0.05)
            self.loss = keras.metrics.Mean()

    def replica_step(self, batch: Any) -> Any:
        self.num_traces += 1
        x, y = batch
        if not self.model.built:
            self.model.build(x.shape)

        def loss() -> Any:
            return sg.compute_average_loss(jnp.square(self.model(x, training=True) - y)[:, 0])

        value, grads = sg.value_and_grad(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.model.trainable_variables, strict=True))
        self.loss.update_state(value)
        return value

    def step(self, batch: Any) -> Any:
        per_replica = self.strategy.run(self.replica_step, args=(batch,))
        if self.strategy.num_replicas_in_sync == 1:
            return per_replica
        return self.strategy.reduce("sum", per_replica, axis=None)

    def epochs(self, step: Any) -> list[float]:
        dataset = self.strategy.distribute_dataset(sg.input.Dataset((_X, _Y), batch_size=4))
        return [float(step(batch)) for _ in range(2) for batch in dataset]

    def weights(self) -> list[Any]:
        return [np.asarray(variable.value) for variable in self.model.variables]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["built before", "built in it"])
def test_function_gives_the_numbers_of_the_function_itself(
    strategy: sg.Strategy, late: bool
) -> None:
    keras.utils.set_random_seed(0)
    plain = _Training(strategy, late=late)
    expected = plain.epochs(plain.step)
    keras.utils.set_random_seed(0)
    training = _Training(strategy, late=late)
    losses = training.epochs(sg.function(training.step))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for weight, other in zip(training.weights(), plain.weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-6)
    assert int(training.optimizer.iterations.value) == 8
    np.testing.assert_allclose(training.loss.result(), plain.loss.result(), rtol=1e-5)


def test_replica_function_in_it_is_traced_once_a_shape(strategy: sg.Strategy) -> None:
    training = _Training(strategy)
    step = sg.function(training.step)
    training.epochs(step)
    first = training.num_traces
    training.epochs(step)
    assert training.num_traces == first
    assert first <= 4, "two shapes, and once more for true rows of each"


@pytest.mark.usefixtures("execution")
def test_variables_are_read_and_assigned_between_runs(strategy: sg.Strategy) -> None:
    with strategy.scope():
        mirrored = sg.Variable(1.0, aggregation="sum")
        own = sg.Variable(0.0, synchronization="on_read", aggregation="sum")

    def count() -> None:
        own.assign_add(mirrored.value)

    @sg.function
    def step(scale: Any) -> Any:
        mirrored.assign(mirrored.value * scale)
        strategy.run(count)
        seen = own.value
        own.assign(0.0 * seen)
        mirrored.assign_add(1.0)
        return {"seen": seen, "now": mirrored.value, "name": "step", "nothing": None}

    n = strategy.num_replicas_in_sync
    for scale, seen, now in ((3.0, 3.0, 4.0), (2.0, 8.0, 9.0)):
        result = step(scale)
        assert float(result["seen"]) == seen * n
        assert float(result["now"]) == now == float(mirrored.value)
        assert (result["name"], result["nothing"]) == ("step", None)
        assert float(own.value) == 0.0


@pytest.mark.usefixtures("execution")
def test_per_replica_values_go_in_and_come_out(distributing: sg.Strategy) -> None:
    n = distributing.num_replicas_in_sync

    @sg.function
    def step(value: Any, by: Any) -> Any:
        return distributing.run(lambda part: part * by, args=(value,))

    whole = split(distributing, lambda i: np.full(2, i, "float32"))
    uneven = split(distributing, lambda i: np.ones(1 + i % 2, "float32"))
    doubled = step(whole, np.float32(2))
    assert [part.tolist() for part in parts_of_all(distributing, doubled)] == [
        [2.0 * i] * 2 for i in range(n)
    ]
    parts = parts_of_all(distributing, step(uneven, np.float32(2)))
    assert [part.tolist() for part in parts] == [[2.0] * (1 + i % 2) for i in range(n)]
    total = sg.function(lambda v: distributing.reduce("sum", v, axis=0))(uneven)
    assert float(total) == sum(1 + i % 2 for i in range(n))
    gathered = sg.function(lambda v: distributing.gather(v, axis=0))(whole)
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(n), 2))


def test_results_may_be_used_beside_those_of_other_devices(strategy: sg.Strategy) -> None:
    @sg.function
    def step(x: Any) -> Any:
        return strategy.run(lambda part: part + 1.0, args=(x,))

    result = step(jax.device_put(np.float32(1), jax.local_devices()[-1]))
    assert [float(part) for part in parts_of_all(strategy, result)] == [2.0] * (
        strategy.num_replicas_in_sync
    )
