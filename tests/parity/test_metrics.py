"""Metrics over several replicas and uneven batches, against those of one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    classification,
    evaluated,
    example_weights,
    fitted,
    regression,
    small_classifier,
    small_regressor,
    with_known_weights,
)


class _MeanOfLargest(keras.metrics.Metric):
    """Mean over examples of the largest prediction, which takes weights and does nothing with them.

    Keras gives every compiled metric this argument, so that many are written like this.
    """

    def __init__(self, name: str = "mean_of_largest") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        largest = keras.ops.max(y_pred, axis=-1)
        self.total.assign_add(keras.ops.sum(largest))
        self.count.assign_add(keras.ops.cast(keras.ops.size(largest), "float32"))

    def result(self) -> Any:
        return self.total / self.count


def _true_rate(y_true: Any, y_pred: Any) -> Any:
    """A metric that is a plain function: one value an example."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


@pytest.mark.slow
def test_metrics_of_classes() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, labels = classification()
        y = np.eye(3, dtype="float32")[labels]
        metrics = keras.metrics
        with scope():
            model = small_classifier()
            model.compile(
                optimizer=keras.optimizers.SGD(0.1),
                loss="categorical_crossentropy",
                metrics=[
                    "accuracy",
                    metrics.AUC(num_thresholds=20),
                    metrics.F1Score(average="macro"),
                    metrics.OneHotMeanIoU(num_classes=3),
                    metrics.Precision(thresholds=0.4),
                    metrics.Recall(thresholds=0.4),
                    metrics.TopKCategoricalAccuracy(k=2),
                    metrics.CategoricalCrossentropy(),
                    _MeanOfLargest(),
                    _true_rate,
                ],
            )
        return evaluated(model, x, y, batch_size=4)

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_mean_iou_of_labels() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, labels = classification()
        with scope():
            model = small_classifier()
            model.compile(
                optimizer=keras.optimizers.SGD(0.1),
                loss="sparse_categorical_crossentropy",
                metrics=[keras.metrics.MeanIoU(num_classes=3, sparse_y_pred=False)],
            )
        return evaluated(model, x, labels)

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_metrics_of_numbers() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, _ = regression()
        y = np.stack([x[:, 0] + x[:, 1], x[:, 2]], axis=1)
        metrics = keras.metrics
        with scope():
            model = with_known_weights(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
            model.compile(
                optimizer=keras.optimizers.SGD(0.1),
                loss="mse",
                metrics=[
                    "mae",
                    metrics.RootMeanSquaredError(),
                    metrics.R2Score(),
                    metrics.CosineSimilarity(),
                    metrics.LogCoshError(),
                    metrics.PearsonCorrelation(),
                    metrics.ConcordanceCorrelation(),
                ],
            )
        return fitted(model, x, y)

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_weighted_metrics_see_weights_and_the_others_do_not() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        weights = example_weights(len(x))
        with scope():
            model = small_regressor()
            model.compile(
                optimizer="sgd",
                loss="mse",
                metrics=["mae"],
                weighted_metrics=["mae", keras.metrics.RootMeanSquaredError()],
            )
        return evaluated(model, x, y, sample_weight=weights, batch_size=4)

    measured = assert_like_plain_keras(job, replicas=(2, 3))
    assert abs(measured["evaluate weighted_mae"] - measured["evaluate mae"]) > 1e-3


def test_batch_logs_are_the_running_values_of_one_device() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        seen: list[dict[str, float]] = []
        recorder = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append({"batch": batch, **logs})
        )
        with scope():
            model = small_regressor()
            model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        fitted(model, x, y, epochs=1, callbacks=[recorder])
        return {
            f"{key} after batch {index}": value
            for index, logs in enumerate(seen)
            for key, value in logs.items()
        }

    assert len(assert_like_plain_keras(job)) == 6
