"""fit, evaluate and predict on workers, beside the same model on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.keras.trained_models import table_model

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
    model = table_model()
    model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"], **options)
    return model


def values_of(model: keras.Model) -> list[np.ndarray]:
    seeds = "seed_generator_state"
    every = [*model.variables, *model.optimizer.variables]
    return [np.asarray(one.value) for one in every if seeds not in one.path]


def assert_same(model: keras.Model, other: keras.Model) -> None:
    for one, two in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        pytest.param(dense, X, {}, id="dense one"),
        pytest.param(table, IDS, {"steps_per_execution": 3}, id="table three"),
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


def scaled() -> keras.Model:
    model = dense()
    inner = keras.optimizers.Adam(0.01)
    scaling = keras.optimizers.LossScaleOptimizer(inner, 2.0**126, dynamic_growth_steps=2)
    model.compile(scaling, "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(dense, marks=pytest.mark.slow),
        table,
        pytest.param(scaled, marks=pytest.mark.slow),
    ],
)
def test_workers_of_several_devices_split_their_batches(make) -> None:
    data = IDS if make is table else X
    fitted: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        mirrored = make()
    mirrored.fit(data, Y, **fitted)
    with local_strategy(devices_per_worker=2) as strategy:
        with strategy.scope():
            model = make()
        model.fit(data, Y, **fitted)
        assert_same(model, mirrored)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.compatibility
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


@pytest.mark.slow
def test_endless_data_need_steps() -> None:
    def endless():
        while True:
            yield X[:8], Y[:8]

    with local_strategy(num_workers=2) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(endless(), steps_per_epoch=5, epochs=2, verbose=0, shuffle=False)
        assert int(model.optimizer.iterations) == 10


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


class _Sees(keras.callbacks.Callback):
    """Notes what callbacks of batches and epochs see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, int(self.model.optimizer.iterations)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, int(self.model.optimizer.iterations), *logs.values()))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, *logs.values()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((epoch, int(self.model.optimizer.iterations)))


class _SetsRate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


class _ClipsWeights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.set_weights([np.clip(one, -0.3, 0.3) for one in self.model.get_weights()])


class _RateByLoss(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(0.02 * float(logs["loss"]))


def _batches(count: int) -> Iterator[Any]:
    for number in range(count):
        yield X[number : number + 5], Y[number : number + 5]


class _OwnSteps(keras.Model):
    """Updates its metrics itself, and names them otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(2)
        self.tracked = keras.metrics.Mean(name="tracked")

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def _update(self, y: Any, y_pred: Any, loss: Any) -> dict[str, Any]:
        self.tracked.update_state(loss)
        for metric in self.metrics:
            if metric.name == "compile_metrics":
                metric.update_state(y, y_pred)
        results = {"of " + one.name: one.result() for one in self.metrics if one.name != "loss"}
        return {**results, "own": loss}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data

        def loss() -> Any:
            y_pred = self(x, training=True)
            return keras.ops.mean((y_pred - y) ** 2), y_pred

        (value, y_pred), gradients = sg.value_and_grad(loss, self.trainable_variables, has_aux=True)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._update(y, y_pred, value)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        return self._update(y, y_pred, keras.ops.mean((y_pred - y) ** 2))


class _Factorization(keras.Model):
    """A factorization machine."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = keras.layers.Embedding(9000, 8)
        self.linear = keras.layers.Embedding(9000, 2)
        self.bias = self.add_weight(shape=(2,), initializer="zeros")

    def call(self, ids: Any) -> Any:
        factors = self.factors(ids)
        pairs = keras.ops.sum(factors, 1) ** 2 - keras.ops.sum(factors**2, 1)
        linear = keras.ops.sum(self.linear(ids), 1)
        return linear + keras.ops.sum(pairs, -1, keepdims=True) + self.bias


def _plain(optimizer: Any = None, loss: Any = "mse", **options: Any) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(4, "relu", **options), layers.Dense(2)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["mae"])
    return model


def _of_table() -> Any:
    model = _Factorization()
    model.compile(_optimizers.Adagrad(0.05), "mse", metrics=["mae"])
    return _fitted(model, x=IDS)


def _fitted(model: keras.Model, *callbacks: Any, x: Any = X, **options: Any) -> Any:
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    given["validation_data"] = (x[:20], Y[:20])
    history = model.fit(x, Y, callbacks=list(callbacks), **given).history
    evaluated = model.evaluate(x, Y, batch_size=9, verbose=0, return_dict=True)
    return [history, evaluated, [getattr(one, "seen", None) for one in callbacks]], model


def _of_generators() -> Any:
    model, sees = _plain(), _Sees()
    given: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [sees]}
    model.fit(_batches(19), **given)
    model.fit(_batches(14), epochs=2, steps_per_epoch=7, **given)
    return [sees.seen, model.evaluate(_batches(7), verbose=0, callbacks=[sees])], model


def _compiled_again() -> Any:
    model = _plain()
    first = _fitted(model)[0]
    model.compile(keras.optimizers.SGD(0.01), "mae")
    return [first, _fitted(model)[0]], model


def _own_steps() -> Any:
    model = _OwnSteps()
    model.compile(keras.optimizers.SGD(0.1), metrics=["mae"])
    return _fitted(model)


def _with_spectral_normalization() -> Any:
    layers = keras.layers
    normalized = layers.SpectralNormalization(layers.Dense(4))
    model = keras.Sequential([layers.Input((6,)), normalized, layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return _fitted(model)


def _scaled(initial_scale: float) -> Any:
    inner = keras.optimizers.Adam(0.05)
    growing = {"initial_scale": initial_scale, "dynamic_growth_steps": 2}
    return _fitted(_plain(keras.optimizers.LossScaleOptimizer(inner, **growing)))


def _halved(epoch: int, rate: float) -> float:
    return rate * 0.5


_Schedule = keras.optimizers.schedules.ExponentialDecay
_callbacks, _optimizers = keras.callbacks, keras.optimizers
PROGRAMS: dict[str, Callable[[], Any]] = {
    "callback of batches": lambda: _fitted(_plain(), _Sees()),
    "callback of groups": lambda: _fitted(_plain(), _Sees(), batch_size=5),
    "callback of generators": _of_generators,
    "rate set by batch": lambda: _fitted(_plain(), _SetsRate()),
    "rate set by loss": lambda: _fitted(_plain(), _RateByLoss()),
    "weights set by batch": lambda: _fitted(_plain(), _ClipsWeights()),
    "rate set by epoch": lambda: _fitted(_plain(), _callbacks.LearningRateScheduler(_halved)),
    "rate by schedule": lambda: _fitted(_plain(_optimizers.Adam(_Schedule(0.1, 2, 0.5)))),
    "best weights restored": lambda: _fitted(
        _plain(),
        _callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, restore_best_weights=True),
    ),
    "averages swapped": lambda: _fitted(
        _plain(_optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)),
        _callbacks.SwapEMAWeights(swap_on_epoch=True),
    ),
    "gradients accumulated": lambda: _fitted(
        _plain(_optimizers.Adam(0.1, gradient_accumulation_steps=2))
    ),
    "compiled again": _compiled_again,
    "own steps": _own_steps,
    "constraint": lambda: _fitted(_plain(kernel_constraint=keras.constraints.MaxNorm(0.5))),
    "spectral normalization": _with_spectral_normalization,
    "scaled loss": lambda: _scaled(1024.0),
    "scaled loss without end": lambda: _scaled(2.0**127),
    "table": _of_table,
}
_QUICK = [
    "callback of batches",
    "rate set by epoch",
    "own steps",
    "constraint",
    "scaled loss without end",
]


@pytest.fixture(scope="module")
def strategies() -> Iterator[Callable[[str], Any]]:
    """Strategies by name, made where they are asked for."""
    options = {"one": {"num_servers": 1}, "two": {"num_workers": 2, "mode": UpdateMode(2)}}
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(local_strategy(**options[name])))


# Keras warns of each generator without steps_per_epoch.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("workers", ["one", pytest.param("two", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [one if one in _QUICK else pytest.param(one, marks=pytest.mark.slow) for one in PROGRAMS],
)
def test_program_has_the_numbers_of_one_device(strategies, name, workers) -> None:
    if (name, workers) == ("scaled loss without end", "two"):
        pytest.skip("the parts of two workers overflow at other steps than a whole batch")
    found = []
    for strategy in (sg.OneDeviceStrategy("cpu:0"), strategies(workers)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            results, model = PROGRAMS[name]()
        values = [np.asarray(one.value) for one in (*model.weights, *model.optimizer.variables)]
        found.append((results, values))
    (expected, alone), (served, values) = found
    leaves, structure = jax.tree.flatten(served)
    assert structure == jax.tree.structure(expected)
    for one, two in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6, err_msg=str(expected))
    for one, two in zip(values, alone, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "is_equal"),
    [
        (_optimizers.SGD, True),
        (_optimizers.Adagrad, True),
        (_optimizers.Adam, False),
    ],
)
def test_rows_that_are_not_looked_up_stand_still(strategies, optimizer, is_equal) -> None:
    ids = np.arange(9000, dtype="int32").reshape(3, 3000)
    y = np.ones((3, 3000, 8), "float32")
    found = []
    for strategy in (sg.OneDeviceStrategy("cpu:0"), strategies("one")):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layer = keras.layers.Embedding(9000, 8)
            model = keras.Sequential([keras.Input((3000,), dtype="int32"), layer])
            model.compile(optimizer(0.01), keras.losses.MeanSquaredError(reduction="sum"))
        found.append([])
        for first in (0, 0, 2, 0):  # all rows, or a third of them
            model.train_on_batch(ids[first:], y[first:])
            found[-1].append(np.asarray(layer.embeddings.value))
    alone, served = found
    for one, two in zip(served[:2], alone[:2], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(served[2][:6000], served[1][:6000])
    assert np.allclose(served[3][:6000], alone[3][:6000], rtol=1e-5, atol=1e-6) == is_equal
    np.testing.assert_allclose(served[3][6000:], alone[3][6000:], rtol=1e-5, atol=1e-6)
