"""Evaluation gives the results of plain Keras on one device."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.steps import VariableStore
from tests.unit.estimator.model_functions import (
    cross_entropy,
    dataset_of,
    dense_classifier,
    dense_layers,
    estimator_of,
    examples,
    plain_model,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns an Estimator after 8 steps and the same plain Keras model."""
    x, y = examples(32)
    estimator = estimator_of(dense_classifier, tmp_path_factory.mktemp("model"))
    estimator.train(dataset_of(x, y, 8))
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for start in range(0, 32, 8):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    return estimator, model


@pytest.mark.slow
def test_metrics_and_loss_are_those_of_one_device(trained) -> None:
    estimator, model = trained
    x, y = examples(37)  # neither the batches nor the replicas come out even
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    config = estimator.config.replace(eval_distribute=strategy)
    other = sg.estimator.Estimator(dense_classifier, config=config)
    results = other.evaluate(dataset_of(x, y, 3))
    assert results["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert results["accuracy"] == pytest.approx(expected["accuracy"])
    assert results["global_step"] == 4
    assert other.evaluate(dataset_of(x, y, 5))["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_steps_are_batches_of_all_replicas(trained) -> None:
    estimator, model = trained
    x, y = examples(32)
    expected = model.evaluate(x[:16], y[:16], verbose=0, return_dict=True)["loss"]
    assert estimator.evaluate(dataset_of(x, y, 8), steps=2)["loss"] == pytest.approx(expected)
    # Arrays are one batch, which is the same in every step.
    same = estimator.evaluate(lambda: (x[:16], y[:16]), steps=3)["loss"]
    assert same == pytest.approx(expected)
    assert estimator.evaluate(lambda: (x[:16], y[:16]))["loss"] == pytest.approx(expected)


@pytest.mark.slow
def test_an_earlier_checkpoint_is_evaluated_by_its_path(tmp_path) -> None:
    x, y = examples(32)
    estimator = estimator_of(dense_classifier, tmp_path, save_checkpoints_steps=2)
    estimator.train(dataset_of(x, y, 8))
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    losses = {0: float(model.loss(y, model(x)))}
    for step in range(1, 5):
        model.train_on_batch(x[8 * step - 8 : 8 * step], y[8 * step - 8 : 8 * step])
        losses[step] = float(model.loss(y, model(x)))
    for step in (2, 4, 0):
        path = str(tmp_path / f"model.ckpt-{step}")
        results = estimator.evaluate(dataset_of(x, y, 8), checkpoint_path=path)
        assert results["loss"] == pytest.approx(losses[step], abs=1e-5)
        assert results["global_step"] == step
    # Training goes on from the latest one all the same.
    estimator.train(dataset_of(x, y, 8), steps=1)
    assert estimator.get_variable_value("global_step") == 5


def test_the_mean_of_a_metric_over_scalars_counts_examples(tmp_path) -> None:
    def model_fn(features, labels, mode):
        loss = keras.ops.mean(keras.layers.Dense(1, kernel_initializer="ones")(features))
        metric = keras.metrics.Mean(name="m")
        metric.update_state(features[:, 0])
        train_op = keras.optimizers.SGD(0.0)
        return sg.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, eval_metric_ops={"m": metric}
        )

    x = np.arange(10, dtype="float32").reshape(5, 2)
    data = lambda: sg.input.Dataset(x, batch_size=2)  # noqa: E731
    estimator = estimator_of(model_fn, tmp_path)
    estimator.train(data, steps=1)
    results = estimator.evaluate(data)
    assert results["m"] == pytest.approx(x[:, 0].mean())
    assert results["loss"] == pytest.approx(x.sum(1).mean())


def test_a_metric_may_not_be_called_loss(tmp_path) -> None:
    def model_fn(features, labels, mode):
        loss = cross_entropy()(labels, keras.layers.Dense(3)(features))
        metrics = {"loss": keras.metrics.Mean()}
        return sg.estimator.EstimatorSpec(
            mode, loss=loss, train_op=keras.optimizers.SGD(), eval_metric_ops=metrics
        )

    x, y = examples(4)
    estimator = estimator_of(model_fn, tmp_path).train(dataset_of(x, y, 4))
    with pytest.raises(ValueError, match='eval_metric_ops contains a metric named "loss"'):
        estimator.evaluate(dataset_of(x, y, 4))


def test_hooks_may_end_an_evaluation(trained) -> None:
    class Stop(sg.estimator.SessionRunHook):
        steps = 0

        def before_run(self, run_context):
            return sg.estimator.SessionRunArgs("loss")

        def after_run(self, run_context, run_values):
            assert np.isfinite(run_values.results)
            self.steps += 1
            if self.steps == 2:
                run_context.request_stop()

    estimator, model = trained
    x, y = examples(32)
    hook = Stop()
    results = estimator.evaluate(dataset_of(x, y, 8), hooks=[hook])
    assert hook.steps == 2
    expected = model.evaluate(x[:16], y[:16], verbose=0, return_dict=True)["loss"]
    assert results["loss"] == pytest.approx(expected)


# Variables are reused by creation order.


@pytest.fixture
def store():
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        yield VariableStore(strategy)


def make(store, mode, *shapes, name="w", dtype="float32"):
    with store.call(mode):
        return [keras.Variable("zeros", shape=shape, dtype=dtype, name=name) for shape in shapes]


def test_layers_get_the_same_names_and_variables_in_each_call(store) -> None:
    kernels = []
    outside = keras.layers.Dense(1).name
    for _ in range(2):
        with store.call("train"):
            layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
            for layer in layers:
                layer.build((None, 2))
        assert [layer.name for layer in layers] == ["dense", "dense_1"]
        kernels.append([layer.kernel for layer in layers])
    assert kernels[0][0] is kernels[1][0]
    assert kernels[0][1] is kernels[1][1]
    assert keras.layers.Dense(1).name != outside  # names outside go on
    assert sorted(store.named) == [
        "dense/bias",
        "dense/kernel",
        "dense_1/bias",
        "dense_1/kernel",
        "global_step",
    ]


def test_modes_share_what_has_one_path_and_not_metrics(store) -> None:
    def call(mode):
        with store.call(mode):
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
            return layer, keras.metrics.Mean(name="mean")

    (trained, train_mean), (evaluated, eval_mean) = call("train"), call("eval")
    assert evaluated.kernel is trained.kernel
    assert eval_mean.total is not train_mean.total
    assert call("eval")[1].total is eval_mean.total
    assert not any("mean" in name for name in store.named)


def test_two_variables_of_one_path_are_distinguished(store) -> None:
    one, other = make(store, "train", (1,), (1,))
    for found in ((store.find("w"), store.find("w#2")), make(store, "eval", (1,), (1,))):
        assert found[0] is one
        assert found[1] is other


def test_a_layer_that_one_mode_freezes_is_trainable_in_another(store) -> None:
    def build(mode):
        with store.call(mode):
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
        return layer

    build("eval").trainable = False
    assert store.find("dense/kernel").trainable is False
    assert build("train").kernel.trainable is True


@pytest.mark.parametrize(
    ("mode", "shapes", "dtype", "words"),
    [
        ("train", [(3,), (3,)], "float32", "Variable 1 of the model function in mode 'train'"),
        ("train", [(2,), (3,)], "float16", "in an earlier call it was 'w' with shape"),
        ("train", [(2,), (3,), (2,)], "float32", "The model function created more than the"),
        ("train", [(2,)], "float32", r"an earlier call: 'w' with shape \(3,\) is missing"),
        ("eval", [(3,)], "float32", "and dtype float32 in mode 'eval', but"),
    ],
)
def test_other_variables_are_refused(store, mode, shapes, dtype, words) -> None:
    make(store, "train", (2,), (3,))
    with pytest.raises(ValueError, match=words):
        make(store, mode, *shapes, dtype=dtype)


# Predictions are rows in input order.

X, Y = examples(19)


@pytest.fixture(scope="module")
def trained_of_prediction(tmp_path_factory):
    """Trained on several replicas; prediction still runs on one device."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_of(dense_classifier, tmp_path_factory.mktemp("model"), strategy)
    return estimator.train(dataset_of(X, Y, 4))


@pytest.fixture(scope="module")
def expected():
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for start in range(0, 19, 8):
        model.train_on_batch(X[start : start + 8], Y[start : start + 8])
    return np.asarray(model(X))


def test_rows_are_those_of_plain_keras(trained_of_prediction, expected) -> None:
    rows = list(trained_of_prediction.predict(dataset_of(X, Y, 4)))
    assert [sorted(row) for row in rows] == [["classes", "logits"]] * 19
    np.testing.assert_allclose([row["logits"] for row in rows], expected, atol=1e-5)
    assert [int(row["classes"]) for row in rows] == expected.argmax(-1).tolist()


def test_features_alone_and_arrays_are_read_once(trained_of_prediction, expected) -> None:
    for data in (lambda: sg.input.Dataset(X, batch_size=8), lambda: X):
        rows = list(trained_of_prediction.predict(data, predict_keys="logits"))
        np.testing.assert_allclose([row["logits"] for row in rows], expected, atol=1e-5)
        assert list(rows[0]) == ["logits"]
    batches = list(trained_of_prediction.predict(dataset_of(X, Y, 8), yield_single_examples=False))
    assert [batch["logits"].shape for batch in batches] == [(8, 3), (8, 3), (3, 3)]


@pytest.mark.parametrize("keys", [["logits", "scores"], []])
def test_unknown_keys_are_refused(trained_of_prediction, keys) -> None:
    class Hook(sg.estimator.SessionRunHook):
        def begin(self) -> None:
            raise AssertionError("The loop has begun.")

    predictions = trained_of_prediction.predict(dataset_of(X, Y, 8), keys, hooks=[Hook()])
    with pytest.raises(ValueError, match="is empty or contains unknown names"):
        next(predictions)


def array_function(features, labels, mode):
    outputs = keras.layers.Dense(1)(features)
    if mode == "infer":
        return sg.estimator.EstimatorSpec(mode, predictions=outputs)
    return sg.estimator.EstimatorSpec(
        mode, loss=keras.ops.mean(outputs), train_op=keras.optimizers.SGD()
    )


def test_trained_estimator_is_pickled(tmp_path) -> None:
    data = dataset_of(X, Y, 8)
    estimator = estimator_of(array_function, tmp_path).train(data)
    copy = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(list(copy.predict(data)), list(estimator.predict(data)))


def test_predictions_without_names_or_rows(tmp_path) -> None:
    def model_fn(features, labels, mode):
        spec = array_function(features, labels, mode)
        if mode != "infer":
            return spec
        total = keras.ops.sum(spec.predictions)
        return sg.estimator.EstimatorSpec(mode, predictions={"total": total})

    data = dataset_of(X, Y, 8)
    estimator = estimator_of(array_function, tmp_path).train(data)
    assert [row.shape for row in estimator.predict(data)] == [(1,)] * 19
    with pytest.raises(ValueError, match=r"one or more of \[\]"):
        next(estimator.predict(data, predict_keys=["logits"]))
    estimator = estimator_of(model_fn, tmp_path)
    batches = list(estimator.predict(data, yield_single_examples=False))
    assert [batch["total"].shape for batch in batches] == [()] * 3
    with pytest.raises(ValueError, match="Predictions of a batch have the shapes"):
        next(estimator.predict(data))
