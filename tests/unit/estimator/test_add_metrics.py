"""add_metrics evaluates extra metrics in addition to existing ones."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

X = np.arange(6, dtype="float32")
Y = (2 * X + 1)[:, None]
WEIGHTS = np.array([1, 0, 1, 0, 2, 0], "float32")


def _data() -> Any:
    return sg.input.Dataset(({"x": X, "weight": WEIGHTS}, Y), batch_size=2)


def _weighted_error(features: Any, labels: Any, predictions: Any) -> dict[str, Any]:
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(labels, predictions["predictions"], features["weight"])
    return {"weighted": metric}


@pytest.mark.slow
def test_metric_of_features_labels_and_predictions_under_a_strategy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    columns = [sg.feature_column.numeric_column(name) for name in ("x", "weight")]
    plain = sg.estimator.LinearRegressor(
        columns, config=sg.estimator.RunConfig(eval_distribute=strategy)
    )
    plain.train(_data)
    estimator = sg.estimator.add_metrics(plain, _weighted_error)

    results, before = estimator.evaluate(_data), plain.evaluate(_data)
    rows = np.stack([row["predictions"] for row in plain.predict(_data)])
    expected = np.sum(WEIGHTS[:, None] * np.abs(rows - Y)) / WEIGHTS.sum()
    assert results.pop("weighted") == pytest.approx(expected, rel=1e-5)
    assert results == pytest.approx(before)
    assert estimator.model_dir == plain.model_dir


def test_metric_of_a_keras_model_that_is_not_trained() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="line")])
    model.compile("sgd", "mse", metrics=["mae"])

    def metric(predictions, config):
        assert config.save_summary_steps == 100
        mean = keras.metrics.Mean()
        mean.update_state(predictions["line"])
        return {"mae": mean}

    estimator = sg.estimator.add_metrics(sg.estimator.model_to_estimator(model), metric)
    results = estimator.evaluate(lambda: (X[:, None], Y))
    assert results["mae"] == pytest.approx(np.mean(np.asarray(model(X[:, None]))), rel=1e-5)


def test_metric_function_of_other_arguments_is_refused() -> None:
    estimator = sg.estimator.LinearRegressor([sg.feature_column.numeric_column("x")])
    with pytest.raises(ValueError, match=r"metric_fn takes the unsupported arguments \['logits'\]"):
        sg.estimator.add_metrics(estimator, lambda logits: {})
