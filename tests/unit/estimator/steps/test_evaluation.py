"""Evaluation gives the results of plain Keras on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
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
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_metrics_and_loss_are_those_of_one_device(trained, num_replicas) -> None:
    estimator, model = trained
    x, y = examples(37)  # neither the batches nor the replicas come out even
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
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
