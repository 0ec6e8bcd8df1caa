"""Training an Estimator gives the results of plain Keras on one device."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    classifier,
    convolutional_layers,
    dataset_of,
    dense_classifier,
    dense_layers,
    estimator_of,
    examples,
    plain_model,
    weights_of,
    weights_of_model,
)

GLOBAL_BATCH = 8
STRATEGIES = {
    "no strategy": (lambda: None, 1),
    "one device": (lambda: sg.OneDeviceStrategy("cpu:1"), 1),
    "mirrored 2": (lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), 2),
    "mirrored 4": (lambda: sg.MirroredStrategy([f"cpu:{i}" for i in range(4)]), 4),
    "central": (lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]), 2),
    "hybrid": (
        lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"kernel": "central"}),
        2,
    ),
}


def of_strategies(*quick: str):
    """Every strategy; those not listed here run only with the slow tests."""
    return pytest.mark.parametrize(
        ("make", "num_replicas"),
        [
            pytest.param(*case, id=name, marks=() if name in quick else pytest.mark.slow)
            for name, case in STRATEGIES.items()
        ],
    )


def assert_same_weights(estimator, model) -> None:
    trained, expected = weights_of(estimator), weights_of_model(model)
    expected = {name: value for name, value in expected.items() if name in trained}
    assert len(expected) >= 4
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, atol=1e-5, err_msg=name)


def fit_in_order(model, x, y) -> list[float]:
    """Losses of the steps of an epoch."""
    return [
        float(model.train_on_batch(x[i : i + GLOBAL_BATCH], y[i : i + GLOBAL_BATCH])[0])
        for i in range(0, len(x), GLOBAL_BATCH)
    ]


@pytest.mark.slow
@of_strategies("no strategy", "mirrored 4", "hybrid")
def test_dense_classifier_is_that_of_one_device(make, num_replicas, tmp_path) -> None:
    x, y = examples(38)  # the last batch is short, and some replicas get none of it
    estimator = estimator_of(dense_classifier, tmp_path, make())
    data = dataset_of(x, y, GLOBAL_BATCH // num_replicas)
    assert estimator.train(data).train(data) is estimator

    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for _ in range(2):
        fit_in_order(model, x, y)
    assert_same_weights(estimator, model)
    assert estimator.get_variable_value("global_step") == 10


@pytest.mark.slow
@of_strategies("mirrored 2")
def test_network_with_batch_normalization_is_that_of_one_device(
    make, num_replicas, tmp_path
) -> None:
    x, y = examples(24, (6, 6, 2))
    several = num_replicas > 1
    model_fn = classifier(
        lambda: convolutional_layers(synchronized=several, dropout=0.0),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    )
    estimator = estimator_of(model_fn, tmp_path, make())
    estimator.train(dataset_of(x, y, GLOBAL_BATCH // num_replicas))

    model = plain_model(
        convolutional_layers(synchronized=False, dropout=0.0),
        keras.optimizers.SGD(0.05, momentum=0.9),
        (6, 6, 2),
    )
    fit_in_order(model, x, y)
    assert_same_weights(estimator, model)


@pytest.mark.slow
def test_dropout_draws_what_plain_keras_draws(tmp_path) -> None:
    x, y = examples(24, (6, 6, 2))
    layers = lambda: convolutional_layers(synchronized=False, dropout=0.5)  # noqa: E731
    estimator = estimator_of(classifier(layers, lambda: keras.optimizers.SGD(0.1)), tmp_path)
    estimator.train(dataset_of(x, y, GLOBAL_BATCH))

    model = plain_model(layers(), keras.optimizers.SGD(0.1), (6, 6, 2))
    fit_in_order(model, x, y)
    assert_same_weights(estimator, model)


@pytest.mark.slow
def test_training_goes_on_under_another_strategy(tmp_path) -> None:
    x, y = examples(32)
    four = sg.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    estimator_of(dense_classifier, tmp_path, four).train(dataset_of(x, y, GLOBAL_BATCH // 4))
    alone = estimator_of(dense_classifier, tmp_path).train(dataset_of(x, y, GLOBAL_BATCH))

    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for _ in range(2):
        fit_in_order(model, x, y)
    assert_same_weights(alone, model)
    assert alone.get_variable_value("global_step") == 8


class Losses(sg.estimator.SessionRunHook):
    """Fetches the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def before_run(self, run_context):
        return sg.estimator.SessionRunArgs("loss")

    def after_run(self, run_context, run_values) -> None:
        self.values.append(float(run_values.results))


@of_strategies("mirrored 2")
def test_reported_loss_is_the_average_over_the_global_batch(make, num_replicas, tmp_path) -> None:
    x, y = examples(38)
    hook = Losses()
    estimator = estimator_of(dense_classifier, tmp_path, make())
    estimator.train(dataset_of(x, y, GLOBAL_BATCH // num_replicas), hooks=[hook])

    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    expected = []
    for i in range(0, len(x), GLOBAL_BATCH):
        batch = x[i : i + GLOBAL_BATCH], y[i : i + GLOBAL_BATCH]
        expected.append(float(model.loss(batch[1], model(batch[0]))))
        model.train_on_batch(*batch)
    np.testing.assert_allclose(hook.values, expected, atol=1e-5)


def two_players(features, labels, mode):
    """Two losses of the same two networks, as in a GAN."""
    make = lambda seed, name: keras.layers.Dense(  # noqa: E731
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), name=name
    )
    first, second = make(1, "first"), make(2, "second")
    product = first(features) * second(features)
    losses = keras.ops.mean(product), keras.ops.mean((product - 1.0) ** 2)
    return sg.estimator.EstimatorSpec(
        mode,
        loss=losses[0],
        train_op=[
            sg.estimator.minimize(keras.optimizers.SGD(0.1), losses[0], first.trainable_variables),
            sg.estimator.minimize(keras.optimizers.SGD(0.2), losses[1], second.trainable_variables),
        ],
    )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_two_optimizers_update_from_the_same_weights(num_replicas, tmp_path) -> None:
    x, _ = examples(24)
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = estimator_of(two_players, tmp_path, strategy)
    estimator.train(lambda: sg.input.Dataset(x, batch_size=GLOBAL_BATCH // num_replicas))

    initial = [keras.initializers.GlorotUniform(seed=seed)((5, 1)) for seed in (1, 2)]
    weights = [{"kernel": kernel, "bias": np.zeros(1, "float32")} for kernel in initial]

    def losses(first, second, rows):
        product = (rows @ first["kernel"] + first["bias"]) * (
            rows @ second["kernel"] + second["bias"]
        )
        return product.mean(), ((product - 1.0) ** 2).mean()

    @jax.jit
    def updated(first, second, rows):
        of_first = jax.grad(lambda w: losses(w, second, rows)[0])(first)
        of_second = jax.grad(lambda w: losses(first, w, rows)[1])(second)
        return [
            jax.tree.map(lambda w, g: w - np.float32(0.1) * g, first, of_first),
            jax.tree.map(lambda w, g: w - np.float32(0.2) * g, second, of_second),
        ]

    for i in range(0, len(x), GLOBAL_BATCH):
        weights = updated(*weights, x[i : i + GLOBAL_BATCH])
    for name, expected in zip(("first", "second"), weights, strict=True):
        for part, value in expected.items():
            trained = estimator.get_variable_value(f"{name}/{part}")
            np.testing.assert_allclose(trained, value, atol=1e-5)
    assert estimator.get_variable_value("global_step") == 3


def table_of_words(features, labels, mode, params):
    """A table large enough for sparse gradients, and an optimizer with loss scaling."""
    normal = keras.initializers.RandomNormal(seed=1)
    rows = keras.layers.Embedding(20_000, 8, embeddings_initializer=normal)(features)
    outputs = keras.layers.Dense(1, kernel_initializer=normal)(keras.ops.mean(rows, axis=1))
    loss = keras.ops.mean((outputs[:, 0] - labels) ** 2)
    optimizer = keras.optimizers.Adagrad(0.1)
    if params["scales"]:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [False, True])
def test_tables_are_trained_wherever_they_are_kept(scales, tmp_path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20_000, (32, 4)).astype("int32")
    labels = rng.normal(size=32).astype("float32")
    strategies = {
        "alone": None,
        "mirrored": sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central": sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        "sharded": sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embeddings": "sharded"}),
    }
    tables = {}
    for name, strategy in strategies.items():
        config = sg.estimator.RunConfig(train_distribute=strategy, save_summary_steps=None)
        estimator = sg.estimator.Estimator(
            table_of_words, tmp_path / name, config, params={"scales": scales}
        )
        batch_size = GLOBAL_BATCH if strategy is None else GLOBAL_BATCH // 2
        estimator.train(dataset_of(ids, labels, batch_size))
        tables[name] = estimator.get_variable_value("embedding/embeddings")

    model = keras.Sequential(
        [
            keras.layers.Embedding(
                20_000, 8, embeddings_initializer=keras.initializers.RandomNormal(seed=1)
            ),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=1)),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    for i in range(0, 32, GLOBAL_BATCH):
        model.train_on_batch(ids[i : i + GLOBAL_BATCH], labels[i : i + GLOBAL_BATCH])
    expected = np.asarray(model.layers[0].embeddings.value)
    assert len(np.unique(ids)) > 100
    for name, table in tables.items():
        np.testing.assert_allclose(table, expected, atol=1e-5, err_msg=name)
