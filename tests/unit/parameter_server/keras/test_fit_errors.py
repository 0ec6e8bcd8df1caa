"""What follows an error, or an end that came too early, in fit and evaluate on workers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.keras.trained_models import (
    NUM_STEPS,
    assert_same,
    dense_model,
    gradients_of,
)
from tests.unit.parameter_server.keras.trained_models import X as X_OF_OPTIMIZERS
from tests.unit.parameter_server.keras.trained_models import Y as Y_OF_OPTIMIZERS

X = np.random.default_rng(0).normal(size=(120, 3)).astype("float32")
Y = X[:, :1]
_LIMIT_S = 60.0
_is_held = threading.Event()
_held_up = threading.Event()


class Holding(keras.layers.Layer):
    """Waits for the test where batches have five rows, and fails on those of four."""

    def call(self, x: Any) -> Any:
        if sg.get_strategy().executor.schedules:  # where Keras only looks at the shapes
            return x
        if x.shape[0] == 4:
            raise ArithmeticError("four rows")
        if x.shape[0] == 5:
            _held_up.set()
            assert _is_held.wait(_LIMIT_S)
        return x


@pytest.fixture
def strategy() -> Iterator[RemoteStateStrategy]:
    with local_strategy(num_workers=2) as made:
        yield made


def make(strategy: RemoteStateStrategy) -> Any:
    with strategy.scope():
        layers = [keras.layers.Input((3,)), Holding(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fit", marks=pytest.mark.slow),
        pytest.param("evaluate", marks=pytest.mark.slow),
        "predict",
    ],
)
def test_error_in_long_data_is_raised_once(strategy, kind) -> None:
    model = make(strategy)
    calls = {
        "fit": lambda size: model.fit(X, Y, batch_size=size, verbose=0),
        "evaluate": lambda size: model.evaluate(X, Y, batch_size=size, verbose=0),
        "predict": lambda size: model.predict(X, batch_size=size, verbose=0),
    }
    with pytest.raises(ArithmeticError, match="four rows"):
        calls[kind](4)
    calls[kind](6)
    assert strategy.executor.coordinator.done()
    np.testing.assert_allclose(
        model.predict(X, batch_size=6, verbose=0),
        X @ model.layers[-1].kernel.numpy() + model.layers[-1].bias.numpy(),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.slow
def test_what_an_interrupted_epoch_has_left_counts_in_no_other(strategy) -> None:
    model = make(strategy)
    _is_held.clear()

    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ConnectionAbortedError("by hand")

    with pytest.raises(ConnectionAbortedError, match="by hand"):
        model.fit(X, Y, batch_size=5, verbose=0, callbacks=[Interrupting()])
    assert _held_up.wait(_LIMIT_S)
    # It goes on while the next call has begun.
    threading.Timer(0.2, _is_held.set).start()
    evaluated = model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)
    predicted = model.predict(X, batch_size=6, verbose=0)
    assert evaluated["mae"] == pytest.approx(np.abs(predicted - Y).mean(), rel=1e-4)


class _Added(keras.metrics.Metric):
    """Adds to its state in each way that a worker can follow."""

    def __init__(self) -> None:
        super().__init__(name="added")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.bins = self.add_weight(shape=(3,), initializer="zeros", name="bins")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ops = keras.ops
        self.count.assign(self.count + ops.shape(y_true)[0])
        total = ops.sum(y_true)
        self.total.assign(ops.where(total > 0, self.total + total, self.total - 1.0))
        self.bins.assign(ops.cond(total > 1, lambda: self.bins + 1.0, lambda: self.bins - total))
        self.bins.assign(ops.scatter_update(ops.zeros(3), [[1]], ops.ones(1)) + self.bins)

    def result(self):
        parts = [keras.ops.cast(self.count, "float32"), self.total, keras.ops.sum(self.bins)]
        return keras.ops.sum(keras.ops.stack(parts))


class _Other(keras.metrics.Metric):
    """Changes its state in another way."""

    def __init__(self, change) -> None:
        super().__init__(name="other")
        self.change = change
        self.state = self.add_weight(shape=(), initializer="zeros", name="state")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(self.change(self.state, keras.ops.max(keras.ops.abs(y_true))))

    def result(self):
        return self.state + 0.0


def _evaluated(scope, metric):
    x = np.arange(10, dtype="float32")[:, None]
    with scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse", metrics=[metric()])
    return model.evaluate(x, x % 4, batch_size=4, verbose=0, return_dict=True)


def test_metrics_that_add_are_counted_by_workers() -> None:
    expected = _evaluated(sg.OneDeviceStrategy("cpu:0").scope, _Added)["added"]
    with local_strategy(num_servers=1) as strategy:
        assert _evaluated(strategy.scope, _Added)["added"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda old, new: keras.ops.maximum(old, new),
        lambda old, new: 0.5 * old + new,
        lambda old, new: new,
        lambda old, new: keras.ops.where(new > 1, old + new, new),
    ],
    ids=["maximum", "average", "last", "restart"],
)
def test_metric_that_does_not_add_is_refused(change) -> None:
    """Workers would count each group of batches from zero, and the results would be added."""
    with (
        local_strategy(num_servers=1) as strategy,
        pytest.raises(NotImplementedError, match=r"'other' does not add to its state"),
    ):
        _evaluated(strategy.scope, lambda: _Other(change))


# Several optimizers whose variables are on the same parameter servers.

optimizers = keras.optimizers


def test_two_optimizers_in_one_step_train_their_own_variables() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = dense_model()
        return model, optimizers.Adam(0.05), optimizers.SGD(0.1, momentum=0.9)

    def train_both(strategy: Any, model: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
        def step() -> Any:
            loss, grads = gradients_of(model, x, y)
            variables = model.trainable_variables
            first.apply(grads[:2], variables[:2])
            second.apply(grads[2:], variables[2:])
            return loss

        return strategy.run(step)

    local = sg.OneDeviceStrategy("cpu:0")
    with local.scope():
        alone = make()
        for optimizer, part in zip(alone[1:], (slice(2), slice(2, 4)), strict=True):
            optimizer.build(alone[0].trainable_variables[part])
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            served = make()
            for optimizer, part in zip(served[1:], (slice(2), slice(2, 4)), strict=True):
                optimizer.build(served[0].trainable_variables[part])

        def function(x: Any, y: Any) -> Any:
            return train_both(sg.get_strategy(), *served, x, y)

        for x, y in zip(X_OF_OPTIMIZERS, Y_OF_OPTIMIZERS, strict=True):
            loss = coordinator.schedule(function, args=(x, y)).fetch()
            np.testing.assert_allclose(loss, train_both(local, *alone, x, y), rtol=1e-4)
        for one, other in zip(served, alone, strict=True):
            assert_same(one.variables, other.variables)
        assert int(served[1].iterations) == int(served[2].iterations) == NUM_STEPS


@pytest.mark.slow
def test_models_one_after_the_other_do_not_fill_the_servers_with_optimizers() -> None:
    x, y = np.concatenate(X_OF_OPTIMIZERS), np.concatenate(Y_OF_OPTIMIZERS)
    with coordinated() as coordinator, coordinator.strategy.scope():
        model = dense_model()
        for number in range(1, 4):
            model.compile(optimizers.Adam(0.05), "mse")
            gc.collect()
            model.fit(x, y, batch_size=40, verbose=0)
            name = "adam" if number == 1 else f"adam_{number}"
            kept = set(coordinator.strategy.placement.remote.variables.client.scalars())
            assert kept == {f"{name}.iteration", f"{name}.learning_rate"}
            assert int(model.optimizer.iterations) == 1
