"""fit, evaluate and predict on workers, beside the same model on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parameter_server.clusters import local_strategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 6)).astype("float32")
Y = RNG.normal(size=(70, 2)).astype("float32")
IDS = RNG.integers(0, 9000, (70, 3), dtype="int32")


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(2, kernel_regularizer="l2"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def table(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((3,), dtype="int32"),
            layers.Embedding(9000, 8),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"], **options)
    return model


def values_of(model: keras.Model) -> list[np.ndarray]:
    seeds = "seed_generator_state"
    every = [*model.variables, *model.optimizer.variables]
    return [np.asarray(one.value) for one in every if seeds not in one.path]


def assert_same(model: keras.Model, other: keras.Model) -> None:
    for one, two in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.compatibility
@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        pytest.param(dense, X, {}, id="dense one"),
        pytest.param(table, IDS, {"steps_per_execution": 3}, id="table three"),
        pytest.param(dense, X, {"steps_per_execution": 3}, marks=pytest.mark.slow),
        pytest.param(table, IDS, {}, marks=pytest.mark.slow),
    ],
)
def test_one_worker_trains_as_one_device_does(
    make: Callable[..., keras.Model], data: Any, options: dict[str, Any]
) -> None:
    fitted: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    alone = make(**options)
    expected = alone.fit(data, Y, validation_data=(data[:20], Y[:20]), **fitted)
    with local_strategy() as strategy:
        with strategy.scope():
            model = make(**options)
        history = model.fit(data, Y, validation_data=(data[:20], Y[:20]), **fitted)
        assert history.history.keys() == expected.history.keys()
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
        assert_same(model, alone)
        np.testing.assert_allclose(
            model.evaluate(data, Y, batch_size=9, verbose=0),
            alone.evaluate(data, Y, batch_size=9, verbose=0),
            rtol=1e-5,
        )
        np.testing.assert_allclose(
            model.predict(data, batch_size=9, verbose=0), alone.predict(data, verbose=0), rtol=1e-5
        )


@pytest.mark.parametrize("make", [dense, table])
def test_workers_of_several_devices_split_their_batches(make) -> None:
    data = X if make is dense else IDS
    fitted: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        mirrored = make()
    mirrored.fit(data, Y, **fitted)
    with local_strategy(devices_per_worker=2) as strategy:
        with strategy.scope():
            model = make()
        model.fit(data, Y, **fitted)
        assert_same(model, mirrored)


@pytest.mark.compatibility
def test_evaluation_counts_every_example_once_on_any_number_of_workers() -> None:
    alone = dense()
    with local_strategy(num_workers=3) as strategy:
        with strategy.scope():
            model = dense()
        np.testing.assert_allclose(
            model.evaluate(X, Y, batch_size=4, verbose=0),
            alone.evaluate(X, Y, batch_size=4, verbose=0),
            rtol=1e-5,
        )
        np.testing.assert_allclose(
            model.predict(X, batch_size=3, verbose=0),
            alone.predict(X, batch_size=3, verbose=0),
            rtol=1e-5,
        )
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0)
        assert int(model.optimizer.iterations) == 3 * 18


def test_callbacks_see_batches_and_logs() -> None:
    seen: list[Any] = []

    class Looking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, sorted(logs)))

        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["mae"])

    with local_strategy(num_workers=2) as strategy:
        with strategy.scope():
            model = dense()
        history = model.fit(X, Y, batch_size=35, epochs=1, verbose=0, callbacks=[Looking()])
        assert seen[:2] == [(0, ["loss", "mae"]), (1, ["loss", "mae"])]
        assert seen[2] == history.history["mae"][0]


def test_single_batches_give_their_own_numbers() -> None:
    alone = dense()
    with local_strategy() as strategy:
        with strategy.scope():
            model = dense()
        np.testing.assert_allclose(
            model.train_on_batch(X[:16], Y[:16]), alone.train_on_batch(X[:16], Y[:16]), rtol=1e-5
        )
        np.testing.assert_allclose(model.test_on_batch(X, Y), alone.test_on_batch(X, Y), rtol=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(X), alone.predict_on_batch(X), rtol=1e-5)


@pytest.mark.compatibility
def test_endless_data_need_steps() -> None:
    def endless():
        while True:
            yield X[:8], Y[:8]

    with local_strategy(num_workers=2) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(endless(), steps_per_epoch=5, epochs=2, verbose=0, shuffle=False)
        assert int(model.optimizer.iterations) == 10


def test_own_train_step_runs_on_workers() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x):
            return self.layer(x)

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "own": logs["loss"] * 2}, state

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = Own()
        model.compile("sgd", "mse")
        return model

    alone = make()
    expected = alone.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    with local_strategy() as strategy:
        with strategy.scope():
            model = make()
        history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
        assert history.history.keys() == expected.history.keys()
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


def test_error_in_a_step_is_raised_by_fit() -> None:
    class Failing(keras.layers.Layer):
        def call(self, x):
            if x.shape[0] == 6:
                raise ArithmeticError("six rows are too many")
            return x

    with local_strategy(num_workers=2) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((6,)), Failing(), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        with pytest.raises(ArithmeticError, match="six rows are too many"):
            model.fit(X, Y, batch_size=16, verbose=0)
        model.fit(X[:64], Y[:64], batch_size=16, verbose=0)  # and then it goes on


def test_eager_steps_are_refused() -> None:
    with local_strategy() as strategy:
        with strategy.scope():
            model = dense(run_eagerly=True)
        with pytest.raises(ValueError, match="The model has run_eagerly=True under a Param"):
            model.fit(X, Y, verbose=0)
