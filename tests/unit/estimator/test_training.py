"""Training an Estimator gives the results of plain Keras on one device."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import estimator as est
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
from tests.unit.estimator.read_scalars import read_scalars

GLOBAL_BATCH = 8
STRATEGIES = {
    "no strategy": (lambda: None, 1),
    "one device": (lambda: sg.OneDeviceStrategy("cpu:1"), 1),
    "mirrored 2": (lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), 2),
    "mirrored 4": (lambda: sg.MirroredStrategy([f"cpu:{i}" for i in range(4)]), 4),
    "central": (lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]), 2),
    "hybrid": (lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"kernel": "central"}), 2),
}


def of_strategies(*names: str):
    cases = [pytest.param(*STRATEGIES[name], id=name) for name in names]
    return pytest.mark.parametrize(("make", "num_replicas"), cases)


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
@of_strategies(*STRATEGIES)
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
def test_dropout_draws_what_plain_keras_draws(tmp_path) -> None:
    x, y = examples(24, (6, 6, 2))
    layers = lambda: convolutional_layers(synchronized=False, dropout=0.5)  # noqa: E731
    estimator = estimator_of(classifier(layers, lambda: keras.optimizers.SGD(0.1)), tmp_path)
    estimator.train(dataset_of(x, y, GLOBAL_BATCH))

    model = plain_model(layers(), keras.optimizers.SGD(0.1), (6, 6, 2))
    fit_in_order(model, x, y)
    assert_same_weights(estimator, model)


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


# A real Estimator with hooks, exporters and in-memory input functions.


_RANDOM = np.random.default_rng(7)
_X = _RANDOM.normal(size=(22, 3)).astype("float32")
_Y = (_X @ np.array([1.0, -2.0, 0.5], "float32") + 0.25).astype("float32")
TRAIN_X, TRAIN_Y, EVAL_X, EVAL_Y = _X[:16], _Y[:16], _X[16:], _Y[16:]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def linear_model(features, labels, mode, params):
    outputs = keras.layers.Dense(1, kernel_initializer="zeros")(features["x"])[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": outputs})
    # Unlike a plain mean it leaves out what pads a short batch.
    loss = keras.losses.MeanSquaredError()(labels[:, None], outputs[:, None])
    error = keras.metrics.MeanAbsoluteError()
    error.update_state(labels[:, None], outputs[:, None])
    optimizer = keras.optimizers.SGD(0.1)
    return est.EstimatorSpec(
        mode,
        loss=loss,
        train_op=est.minimize(optimizer, loss),
        eval_metric_ops={"mae": error},
        training_hooks=[est.LoggingTensorHook({"traced": loss * 2}, every_n_iter=params["log"])],
    )


def train_fn(batch_size=4, num_epochs=None):
    return est.numpy_input_fn({"x": TRAIN_X}, TRAIN_Y, batch_size, num_epochs, shuffle=False)


eval_fn = est.numpy_input_fn({"x": EVAL_X}, EVAL_Y, 4, shuffle=False)


def linear_estimator(tmp_path, *, log=1000, **settings) -> est.Estimator:
    config = est.RunConfig(str(tmp_path / "model"), save_checkpoints_steps=5, **settings)
    return est.Estimator(linear_model, config=config, params={"log": log})


def kernel_and_bias(estimator) -> tuple[Any, Any]:
    values = [estimator.get_variable_value(name) for name in estimator.get_variable_names()]
    (kernel,) = [value for value in values if value.shape == (3, 1)]
    (bias,) = [value for value in values if value.shape == (1,)]
    return kernel, bias


def in_numpy(num_steps: int, batch_size: int, rate: float = 0.1) -> tuple[Any, Any]:
    """Runs gradient descent on the training data, in order."""
    kernel, bias = np.zeros(3), 0.0
    rows = np.tile(np.arange(len(TRAIN_X)), num_steps * batch_size // len(TRAIN_X) + 1)
    for step in range(num_steps):
        chosen = rows[step * batch_size : (step + 1) * batch_size]
        x, error = TRAIN_X[chosen], TRAIN_X[chosen] @ kernel + bias - TRAIN_Y[chosen]
        kernel = kernel - rate * 2 * x.T @ error / batch_size
        bias = bias - rate * 2 * error.mean()
    return kernel, bias


def test_metrics_are_those_of_gradient_descent_in_numpy(tmp_path) -> None:
    estimator = linear_estimator(tmp_path)
    metrics, exports = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_fn(), max_steps=12),
        est.EvalSpec(eval_fn, steps=None, throttle_secs=0),
    )
    kernel, bias = in_numpy(12, 4)
    error = EVAL_X @ kernel + bias - EVAL_Y
    np.testing.assert_allclose(kernel_and_bias(estimator)[0][:, 0], kernel, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-4)
    np.testing.assert_allclose(metrics["mae"], np.mean(np.abs(error)), rtol=1e-4)
    assert (metrics["global_step"], exports) == (12, [])
    record = est.read_eval_metrics(estimator.eval_dir())
    assert list(record) == [5, 10, 12]
    np.testing.assert_allclose(record[12]["loss"], metrics["loss"])


@pytest.mark.slow
def test_best_model_is_exported_and_predicts(tmp_path) -> None:
    pytest.importorskip("flatbuffers", reason="exports need stratagem[checkpoint]")
    specs = {"x": keras.KerasTensor((None, 3), "float32")}
    receiver_fn = est.export.build_raw_serving_input_receiver_fn(specs)
    exporters = [est.BestExporter("best", receiver_fn), est.FinalExporter("final", receiver_fn)]
    estimator = linear_estimator(tmp_path)
    _, (best, final) = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_fn(), max_steps=12),
        est.EvalSpec(eval_fn, exporters=exporters, throttle_secs=0),
    )
    kernel, bias = in_numpy(12, 4)
    for path in (best, final):
        loaded = est.load_exported(path)
        (serve,) = loaded.signatures.values()
        np.testing.assert_allclose(
            np.asarray(serve(x=EVAL_X)["y"]), EVAL_X @ kernel + bias, atol=1e-4
        )
    assert len(list((tmp_path / "model" / "export" / "best").iterdir())) >= 1
    assert len(list((tmp_path / "model" / "export" / "final").iterdir())) == 1


def test_speed_of_training_is_written(tmp_path) -> None:
    linear_estimator(tmp_path, log_step_count_steps=4).train(train_fn(), max_steps=10)
    points = read_scalars(tmp_path / "model")["global_step/sec"]
    assert [step for step, _ in points] == [5, 9]
    assert all(speed > 0 for _, speed in points)
