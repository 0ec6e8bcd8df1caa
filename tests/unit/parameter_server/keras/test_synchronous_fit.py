"""Synchronous updates: workers that share batches, beside one device and mirrored replicas."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.keras.server_keras import shares_of
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.keras.trained_models import assert_same, table_model
from tests.unit.parameter_server.server.update_rules import num_discarded

RNG = np.random.default_rng(1)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = RNG.normal(size=(50, 2)).astype("float32")
IDS = RNG.integers(0, 9000, (50, 3))


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(2, kernel_regularizer="l2")])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def synchronous(num_workers: int, *, backup_workers: int = 0) -> Any:
    return local_strategy(num_workers, mode=UpdateMode(num_workers - backup_workers))


def test_rows_of_tables_are_added_up() -> None:
    # The optimizer of a row that nobody looks up stands still: compared with one worker.
    trained = []
    for num_workers in (1, 3):
        with synchronous(num_workers) as strategy:
            with strategy.scope():
                model = table_model()
                model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
            model.fit(IDS, Y, batch_size=10, shuffle=False, verbose=0)
            trained.append([np.asarray(one.value) for one in model.variables])
    for one, three in zip(*trained, strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_backup_workers_are_not_waited_for() -> None:
    with synchronous(3, backup_workers=1) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, batch_size=12, epochs=3, verbose=0)
        client = strategy.placement.remote.variables.client
        # Every push is part of an update or told to be late; none waits for ever.
        assert not any(told["waiting"] for told in client.describe().values())
        counted = sum(client.staleness().values()) + num_discarded(client)
        assert counted == 2 * 5 * 3 * 2  # two parts of each batch, to two servers
        assert int(model.optimizer.iterations) <= 5 * 3


def test_clipping_is_refused() -> None:
    with synchronous(2) as strategy:
        with strategy.scope():
            model = dense()
            model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
        with pytest.raises(NotImplementedError, match="clips gradients, but servers sum"):
            model.fit(X, Y, verbose=0)


def test_shares_are_all_of_a_batch() -> None:
    batch = (np.arange(7), None)
    shares = shares_of(batch, 3)
    assert [part[0].tolist() for part, _ in shares] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [weight for _, weight in shares] == [3 / 7, 2 / 7, 2 / 7]
    assert [weight for _, weight in shares_of(batch, 9)][-2:] == [0.0, 0.0]


@pytest.mark.slow
def test_steps_that_took_too_long_are_run_again() -> None:
    bounded = UpdateMode(max_staleness=0)
    with local_strategy(3, num_servers=1, mode=bounded) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, batch_size=5, epochs=3, verbose=0)
        client = strategy.placement.remote.variables.client
        assert client.staleness() == {0: 30}
        assert int(model.optimizer.iterations) == 30
        history = model.fit(X, Y, batch_size=5, epochs=1, verbose=0)
        # Each example was counted once, however often its step was run.
        alone = dense()
        alone.set_weights(model.get_weights())
        assert model.evaluate(X, Y, verbose=0)[0] <= history.history["loss"][0]
        np.testing.assert_allclose(
            model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-5
        )


WORDS = np.array([[1, 0, 0], [2, 0, 0], [3, 4, 1], [0, 0, 0], [4, 3, 2], [1, 2, 0], [3, 3, 3]])
LABELS = np.linspace(-2, 3, 21, dtype="float32").reshape(7, 3, 1)
OF_ROWS = np.array([0, 2, 0.5, 0, 1, 3, 0.25], "float32")
OF_WORDS = np.arange(21, dtype="float32").reshape(7, 3) % 4


def _words() -> tuple[Any, Any]:
    words = keras.layers.Input((3,), dtype="int32")
    return words, keras.layers.Embedding(5, 4, mask_zero=True)(words)


def masked(**options: Any) -> keras.Model:
    words, seen = _words()
    model = keras.Model(words, keras.layers.Dense(1, kernel_regularizer="l2")(seen))
    return _compiled(model, **options)


def plain(**options: Any) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([layers.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    return _compiled(model, **options)


def of_two_outputs(**options: Any) -> keras.Model:
    layers = keras.layers
    words, seen = _words()
    pooled = layers.GlobalAveragePooling1D()(seen)
    outputs = {"word": layers.Dense(1)(seen), "row": layers.Dense(3)(pooled)}
    options = {"loss": {"word": "mse", "row": "mse"}, **options}
    options = {"metrics": {"word": "mae", "row": "mse"}, "weighted_metrics": None, **options}
    return _compiled(keras.Model(words, outputs), loss_weights={"word": 0.3, "row": 2.0}, **options)


class OwnStep(keras.Sequential):
    """Reports a number of its own, and gives one to a metric."""

    def train_step(self, data: Any) -> Any:
        x, y = data

        def loss() -> Any:
            errors = keras.ops.mean((self(x, training=True) - y) ** 2, axis=-1)
            return sg.compute_average_loss(errors)  # leaves out the padding of two devices

        value, gradients = sg.value_and_grad(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.of_step.update_state(value)
        return {"own": value, "mean": self.of_step.result()}


def own_step(**options: Any) -> keras.Model:
    model = OwnStep([keras.layers.Input((3,)), keras.layers.Dense(3)])
    model.of_step = keras.metrics.Mean(name="mean")
    return _compiled(model, **options)


class SelfSimilar(keras.layers.Dense):
    """Adds a loss whose denominator only all workers together know."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        outputs = super().call(inputs, training=training)
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        counts = keras.ops.cast(inputs[:, 0] > 0.2, "float32")
        self.add_loss(loss(inputs, outputs, sample_weight=counts))
        return outputs


def recomputed(**options: Any) -> keras.Model:
    layer = SelfSimilar(3)
    model = keras.Sequential([keras.layers.Input((3,)), layer, keras.layers.Dense(3)])
    sg.keras.remat(model, layers=[layer])
    return _compiled(model, **options)


def _compiled(model: keras.Model, **options: Any) -> keras.Model:
    given = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"], **options}
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), **given)
    return model


def _without_nan(y: Any, y_pred: Any) -> Any:
    error = keras.ops.where(keras.ops.isnan(y), 0.0, y - y_pred)
    return keras.ops.mean(error**2, -1)


_NAN = np.where(np.arange(21).reshape(7, 3) % 5 == 0, np.nan, LABELS[..., 0]).astype("float32")
_CLASSES = np.array([0, 2, 1, 1, 0, 2, 2])
_BOTH = {"word": LABELS, "row": LABELS[..., 0]}
_X = LABELS[::-1, :, 0] / 2
SHARED: dict[str, tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    # The model, its data, arguments of compile, arguments of fit.
    "mask and weights of words": (masked, WORDS, LABELS, {}, {"sample_weight": OF_WORDS}),
    "mask of bfloat16": (masked, WORDS, LABELS, {"loss": keras.losses.Huber(dtype="float32")}, {}),
    "no weight": (plain, _X, LABELS[..., 0], {}, {"sample_weight": 0 * OF_ROWS}),
    "classes": (
        plain,
        _X,
        _CLASSES,
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": [],
        },
        {"class_weight": {0: 0.0, 1: 2.0, 2: 0.5}},
    ),
    "nan": (plain, _X, _NAN, {"loss": _without_nan, "metrics": [], "weighted_metrics": []}, {}),
    "two outputs with weights": (
        of_two_outputs,
        WORDS,
        _BOTH,
        {},
        {"sample_weight": {"word": OF_WORDS, "row": OF_ROWS}},
    ),
    "loss in a recomputed layer": (recomputed, _X, LABELS[..., 0], {}, {}),
    "own step": (own_step, _X, LABELS[..., 0], {"metrics": [], "weighted_metrics": []}, {}),
}
_QUICK = ["two outputs with weights", "own step"]


@pytest.fixture(scope="module")
def sharing() -> Any:
    """Strategies by number of workers, and of devices of each."""
    with contextlib.ExitStack() as stack:
        made: dict[tuple[int, int], Any] = {}

        def of(num_workers: int, num_devices: int = 1) -> Any:
            key = num_workers, num_devices
            if key not in made:
                options: dict[str, Any] = {"devices_per_worker": num_devices}
                strategy = local_strategy(num_workers, mode=UpdateMode(num_workers), **options)
                made[key] = stack.enter_context(strategy)
            return made[key]

        yield of


@pytest.mark.parametrize(
    "workers",
    [
        (2,),
        pytest.param((3,), marks=pytest.mark.slow),
        pytest.param((2, 2), marks=pytest.mark.slow),
    ],
    ids=["two", "three", "two of two devices"],
)
@pytest.mark.parametrize(
    "kind",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHARED],
)
def test_rows_that_count_unequally_are_shared_as_one_device_has_them(
    sharing, kind, workers
) -> None:
    make, x, y, compiled, fitted = SHARED[kind]
    orders = [np.arange(7), np.array([6, 2, 4, 0, 1, 3, 5])]
    for order in orders:

        def of(rows: Any, order: Any = order) -> Any:
            return jax.tree.map(lambda leaf: leaf[order] if np.shape(leaf) else leaf, rows)

        given = {name: of(value) if "sample" in name else value for name, value in fitted.items()}
        given |= {"batch_size": 5, "shuffle": False, "verbose": 0}
        data = of(x), of(y)
        keras.utils.set_random_seed(3)
        with sg.OneDeviceStrategy("cpu:0").scope():
            alone = make(**compiled)
        expected = alone.fit(*data, epochs=2, **given)
        keras.utils.set_random_seed(3)
        with sharing(*workers).scope():
            model = make(**compiled)
        history = model.fit(*data, epochs=2, **given)
        assert history.history.keys() == expected.history.keys()
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
        assert_same(model.weights, alone.weights, rtol=1e-5)
        del given["shuffle"]
        given.pop("class_weight", None)
        if kind != "own step":
            np.testing.assert_allclose(
                model.evaluate(*data, **given), alone.evaluate(*data, **given), rtol=1e-5
            )


def test_losses_that_compare_examples_of_several_workers_are_warned_about(sharing) -> None:
    def compares(y: Any, y_pred: Any) -> Any:
        return keras.ops.sum((y - y_pred) ** 2) / keras.ops.sum(keras.ops.abs(y))

    with sharing(2).scope():
        model = plain(loss=compares)
    with pytest.warns(UserWarning, match=r"'compares' is not a sum over examples"):
        model.fit(_X, LABELS[..., 0], verbose=0)


def test_other_variables_of_a_step_are_set_once_by_all_workers(sharing) -> None:
    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.count.assign_add(1.0)
            return x

    def make() -> Any:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), Counts()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    fitted: dict[str, Any] = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        mirrored = make()
    mirrored.fit(X, Y, **fitted)
    with sharing(2).scope():
        model = make()
    model.fit(X, Y, **fitted)
    assert_same(model.weights, mirrored.weights, rtol=1e-5)


def test_function_that_is_scheduled_after_fit_has_no_part_of_a_batch() -> None:
    with synchronous(2) as strategy:
        with strategy.scope():
            model = dense()
            average = sg.Variable(np.zeros(2, "float32"), trainable=False, aggregation="mean")
        model.fit(X, Y, batch_size=10, verbose=0)
        coordinator = sg.coordinator.ClusterCoordinator(strategy)

        def step() -> None:
            def replica() -> None:
                gradients = [keras.ops.zeros(one.shape) for one in model.trainable_variables]
                model.optimizer.apply(gradients, model.trainable_variables)
                average.assign([1.0, 1.0])

            sg.get_strategy().run(replica)

        for _ in range(2):
            coordinator.schedule(step)
        coordinator.join()
        np.testing.assert_array_equal(average.value, [1.0, 1.0])
