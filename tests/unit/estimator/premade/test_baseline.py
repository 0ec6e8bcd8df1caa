"""Baseline Estimators learn the label distribution."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg


def _data(features: dict[str, Any], labels: Any) -> Any:
    return lambda: sg.input.Dataset((features, labels), batch_size=len(labels) // 2)


@pytest.mark.slow
def test_regressor_learns_the_weighted_mean_under_a_strategy() -> None:
    labels = np.array([[1.0], [2.0], [6.0], [7.0]], "float32")
    weights = np.array([1.0, 1.0, 1.0, 5.0], "float32")
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    config = sg.estimator.RunConfig(train_distribute=strategy)
    regressor = sg.estimator.BaselineRegressor(weight_column="w", optimizer="SGD", config=config)
    data = _data({"name": np.array(["a", "b", "c", "d"]), "w": weights}, labels)
    for _ in range(20):
        regressor.train(data)

    expected = np.average(labels[:, 0], weights=weights)
    rows = list(regressor.predict(data))
    assert [row["predictions"][0] for row in rows] == pytest.approx([expected] * 4, rel=1e-4)
    assert regressor.get_variable_names()[:1] == ["baseline/bias"]


@pytest.mark.slow
def test_first_step_of_ftrl_is_that_of_keras() -> None:
    labels = np.array([1, 2, 2, 0, 2, 2])
    classifier = sg.estimator.BaselineClassifier(n_classes=3)
    classifier.train(_data({"x": np.zeros(6)}, labels), steps=2)

    bias = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.Ftrl(0.3)
    for half in (labels[:3], labels[3:]):
        logits = np.asarray(bias.value)
        softmax = np.exp(logits) / np.exp(logits).sum()
        optimizer.apply([softmax - np.eye(3, dtype="float32")[half].mean(axis=0)], [bias])
    got = classifier.get_variable_value("baseline/bias")
    np.testing.assert_allclose(got, np.asarray(bias.value), rtol=1e-4, atol=1e-6)


def test_estimator_takes_any_head() -> None:
    head = sg.estimator.RegressionHead(label_dimension=2)
    estimator = sg.estimator.BaselineEstimator(head, optimizer="SGD")
    labels = np.array([[1.0, -1.0]] * 4, "float32")
    data = _data({"x": np.zeros(4)}, labels)
    estimator.train(data)
    results = estimator.evaluate(data)
    assert results["prediction/mean"] == pytest.approx(0, abs=1e-6)
    assert results["average_loss"] < 1
