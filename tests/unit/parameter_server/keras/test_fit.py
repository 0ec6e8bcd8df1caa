"""fit, evaluate and predict on workers, beside the same model on one device."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.keras.trained_models import dense_model, table_model

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 6)).astype("float32")
Y = RNG.normal(size=(70, 2)).astype("float32")
IDS = RNG.integers(0, 9000, (70, 3), dtype="int32")


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    first = [layers.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization()]
    last = [layers.Dropout(0.2), layers.Dense(2, kernel_regularizer="l2")]
    model = keras.Sequential([*first, *last])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


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


def _plain(optimizer: Any = None, loss: Any = "mse", **options: Any) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(4, "relu", **options), layers.Dense(2)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["mae"])
    return model


def _fitted(model: keras.Model, *callbacks: Any, x: Any = X, **options: Any) -> Any:
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    given["validation_data"] = (x[:20], Y[:20])
    history = model.fit(x, Y, callbacks=list(callbacks), **given).history
    evaluated = model.evaluate(x, Y, batch_size=9, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=3, verbose=0)
    seen = [getattr(one, "seen", None) for one in callbacks]
    return [history, evaluated, predicted, seen], model


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


def _scaled(initial_scale: float) -> Any:
    inner = keras.optimizers.Adam(0.05)
    growing = {"initial_scale": initial_scale, "dynamic_growth_steps": 2}
    return _fitted(_plain(keras.optimizers.LossScaleOptimizer(inner, **growing)))


def _numbered() -> Any:
    """Steps are counted on from a number that was set before."""
    model = _plain(_optimizers.SGD(_Schedule(1.0, 2, 0.5)))
    model.optimizer.variables[0].assign(7)
    return _fitted(model)


def _undecayed(**excluded: Callable[[Any], Any]) -> Any:
    model = _plain(_optimizers.AdamW(0.05, weight_decay=0.5))
    for name, select in excluded.items():
        model.optimizer.exclude_from_weight_decay(**{name: select(model)})
    return _fitted(model)


def _frozen() -> Any:
    model = _plain()
    model.layers[0].trainable = False
    model.compile(_optimizers.Adam(0.05), "mse")
    return _fitted(model)


def _of_table(optimizer: Any) -> Any:
    model = table_model()
    model.compile(optimizer, "mse", metrics=["mae"])
    return _fitted(model, x=IDS)


def _halved(epoch: int, rate: float) -> float:
    return rate * 0.5


_Schedule = keras.optimizers.schedules.ExponentialDecay
_callbacks, _optimizers = keras.callbacks, keras.optimizers
PROGRAMS: dict[str, Callable[[], Any]] = {
    "averages, dropout and a regularizer": lambda: _fitted(dense()),
    "several steps a call": lambda: _fitted(dense(steps_per_execution=3)),
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
    "steps counted on": _numbered,
    "bias without decay": lambda: _undecayed(var_names=lambda model: ["bias"]),
    "kernel without decay": lambda: _undecayed(var_list=lambda model: [model.layers[0].kernel]),
    "frozen layer": _frozen,
    "compiled again": _compiled_again,
    "constraint": lambda: _fitted(_plain(kernel_constraint=keras.constraints.MaxNorm(0.5))),
    "scaled loss": lambda: _scaled(1024.0),
    "scaled loss without end": lambda: _scaled(2.0**127),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clipped together": lambda: _optimizers.Adam(0.05, global_clipnorm=0.1),
    "clipped values": lambda: _optimizers.SGD(1.0, clipvalue=0.02),
    "scaled and clipped": lambda: _optimizers.SGD(0.1, loss_scale_factor=64.0, clipnorm=0.1),
    "gradients accumulated": lambda: _optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "accumulated and clipped": lambda: _optimizers.SGD(
        1.0, gradient_accumulation_steps=2, clipvalue=0.02
    ),
}
# Those of which rows that nobody looks up stand still: momentum would move them on one device.
OF_TABLES: dict[str, Callable[[], Any]] = {
    "table": lambda: _optimizers.Adagrad(0.1),
    "table, clipped": lambda: _optimizers.SGD(10.0, clipnorm=0.02),
    "table, clipped together": lambda: _optimizers.Adagrad(0.1, global_clipnorm=0.02),
    "table, clipped values": lambda: _optimizers.SGD(10.0, clipvalue=0.003),
    "table, accumulated": lambda: _optimizers.SGD(1.0, gradient_accumulation_steps=2),
    "table, averaged": lambda: _optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5),
}
PROGRAMS |= {name: lambda make=make: _fitted(_plain(make())) for name, make in OPTIMIZERS.items()}
PROGRAMS |= {name: lambda make=make: _of_table(make()) for name, make in OF_TABLES.items()}
# Their random numbers, averages and overflows are those of a part of the batch.
_ALONE = ["averages, dropout and a regularizer", "several steps a call", "scaled loss without end"]
_QUICK = [
    ("callback of batches", "one"),
    ("constraint", "one"),
    ("scaled loss without end", "one"),
    ("steps counted on", "one"),
    ("frozen layer", "one"),
    ("table", "parts"),
]
_CASES = [
    *((name, "one") for name in PROGRAMS),
    # Sums of workers are not clipped.
    *((name, "two") for name in PROGRAMS if name not in _ALONE and "clipped" not in name),
    *((name, "parts") for name in ("table", "table, clipped", "table, clipped values")),
    *((name, "parts") for name in ("clipped together", "scaled and clipped")),
    *((name, "parts") for name in ("bias without decay", "kernel without decay")),
]


@pytest.fixture(scope="module")
def strategies() -> Iterator[Callable[[str], Any]]:
    """Strategies by name, made where they are asked for."""
    parts = {"variable_partitioner": sg.partitioners.FixedShardsPartitioner(3)}
    options: dict[str, dict[str, Any]] = {
        "one": {"num_servers": 1},
        "two": {"num_workers": 2, "mode": UpdateMode(2)},
        "parts": {"devices_per_worker": 2, **parts},
    }
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(local_strategy(**options[name])))


# Keras warns of each generator without steps_per_epoch.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize(
    ("name", "workers"),
    [one if one in _QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in _CASES],
)
def test_program_has_the_numbers_of_one_device(strategies, name, workers) -> None:
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
    [(_optimizers.SGD, True), (_optimizers.Adagrad, True), (_optimizers.Adam, False)],
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


# What follows an error, or an end that came too early; and metrics that workers cannot count.


LONG_X = np.random.default_rng(0).normal(size=(120, 3)).astype("float32")
LONG_Y = LONG_X[:, :1]
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
    "kind", ["fit", pytest.param("evaluate", marks=pytest.mark.slow), "predict"]
)
def test_error_in_long_data_is_raised_once(strategy, kind) -> None:
    model = make(strategy)
    data = [LONG_X] if kind == "predict" else [LONG_X, LONG_Y]
    call = getattr(model, kind)
    with pytest.raises(ArithmeticError, match="four rows"):
        call(*data, batch_size=4, verbose=0)
    call(*data, batch_size=6, verbose=0)  # and then it goes on
    assert strategy.executor.coordinator.done()
    np.testing.assert_allclose(
        model.predict(LONG_X, batch_size=6, verbose=0),
        LONG_X @ model.layers[-1].kernel.numpy() + model.layers[-1].bias.numpy(),
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
        model.fit(LONG_X, LONG_Y, batch_size=5, verbose=0, callbacks=[Interrupting()])
    assert _held_up.wait(_LIMIT_S)
    # It goes on while the next call has begun.
    threading.Timer(0.2, _is_held.set).start()
    evaluated = model.evaluate(LONG_X, LONG_Y, batch_size=6, verbose=0, return_dict=True)
    predicted = model.predict(LONG_X, batch_size=6, verbose=0)
    assert evaluated["mae"] == pytest.approx(np.abs(predicted - LONG_Y).mean(), rel=1e-4)


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


def test_metrics_that_add_are_counted_by_workers_and_others_refused(strategies) -> None:
    """Workers count each group of batches from zero, and the results are added."""
    expected = _evaluated(sg.OneDeviceStrategy("cpu:0").scope, _Added)["added"]
    scope = strategies("one").scope
    assert _evaluated(scope, _Added)["added"] == pytest.approx(expected)
    for change in (
        keras.ops.maximum,
        lambda old, new: 0.5 * old + new,  # an average
        lambda old, new: new,  # the last
        lambda old, new: keras.ops.where(new > 1, old + new, new),  # restarts
    ):
        with pytest.raises(NotImplementedError, match=r"'other' does not add to its state"):
            _evaluated(scope, lambda change=change: _Other(change))


# Several optimizers whose variables are on the same parameter servers.


@pytest.mark.slow
def test_models_one_after_the_other_do_not_fill_the_servers_with_optimizers() -> None:
    x, y = X[:40], Y[:40]
    with coordinated() as coordinator, coordinator.strategy.scope():
        model = dense_model()
        for number in range(1, 4):
            model.compile(_optimizers.Adam(0.05), "mse")
            gc.collect()
            model.fit(x, y, batch_size=40, verbose=0)
            name = "adam" if number == 1 else f"adam_{number}"
            kept = set(coordinator.strategy.placement.remote.variables.client.scalars())
            assert kept == {f"{name}.iteration", f"{name}.learning_rate"}
            assert int(model.optimizer.iterations) == 1
