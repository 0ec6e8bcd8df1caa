"""Metrics for any number of rows, batch size and replicas, beside NumPy's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from keras import ops

from tests.marks import slow
from tests.parity.comparison import example_weights, mirrored


def _root(y_true: Any, y_pred: Any) -> Any:
    """One number a batch, which is no mean over its rows."""
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def _constant(y_true: Any, y_pred: Any) -> Any:
    return ops.full((), 0.25)


class _MeanOfRoots(keras.metrics.Mean):
    """Takes one number of a batch itself, and leaves the average over batches to Keras."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(_root(y_true, y_pred), sample_weight=None)


class _Ratio(keras.metrics.Metric):
    """A sum of ratios of batches, the largest error, and the batches."""

    def __init__(self) -> None:
        super().__init__(name="ratio")
        self.ratios = self.add_variable((), "zeros")
        self.largest = self.add_variable((), keras.initializers.Constant(-3.0))
        self.batches = self.add_variable((), "zeros", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.ratios.assign_add(ops.sum(y_pred) / ops.sum(ops.abs(y_true)))
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))
        self.batches.assign_add(ops.ones((), "int32"))

    def reset_state(self) -> None:
        super().reset_state()
        self.largest.assign(ops.full((), -3.0))

    def result(self) -> Any:
        ratio = self.ratios / ops.cast(self.batches, "float32")
        return {"ratio": ratio, "largest": self.largest.value}


def _data(num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.RandomState(num_rows)
    x = random.standard_normal((num_rows, 2)).astype("float32")
    y = random.standard_normal((num_rows, 2)).astype("float32")
    return x, y, example_weights(max(2, num_rows))[:num_rows]


def _expected(num_rows: int, batch_size: int) -> dict[str, float]:
    x, y, weights = (array.astype("float64") for array in _data(num_rows))
    parts = [slice(first, first + batch_size) for first in range(0, num_rows, batch_size)]
    errors = np.abs(x - y)
    losses = [np.sum(weights[rows] * (errors[rows] ** 2).mean(1)) for rows in parts]
    total = weights.sum()
    roots = float(np.mean([np.sqrt(np.mean(errors[rows] ** 2)) for rows in parts]))
    return {
        "loss": sum(losses) / num_rows,
        "_root": roots,
        "roots": roots,
        "_constant": 0.25,
        "ratio": float(np.mean([x[rows].sum() / np.abs(y[rows]).sum() for rows in parts])),
        "largest": float(errors.max()),
        "mae": float(errors.mean()),
        "mse": float(np.sum(weights * (errors**2).mean(1)) / total) if total else 0.0,
    }


def _assert_like_numpy(num_rows: int, batch_size: int, num_replicas: int, **compiled: Any) -> None:
    keras.backend.clear_session(free_memory=False)
    with mirrored(num_replicas).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Activation("linear")])
        metrics = [_root, _MeanOfRoots(name="roots"), _constant, _Ratio(), "mae"]
        model.compile(loss="mse", metrics=metrics, weighted_metrics=["mse"], **compiled)
    x, y, weights = _data(num_rows)
    logs = model.evaluate(
        x, y, sample_weight=weights, batch_size=batch_size, verbose=0, return_dict=True
    )
    for name, value in _expected(num_rows, batch_size).items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_replicas", "compiled"),
    [
        (7, 4, 2, {}),
        slow(4, 3, 3, {}),
        slow(7, 4, 3, {"steps_per_execution": 2}),
        slow(7, 4, 3, {"run_eagerly": True}),
    ],
)
def test_metrics_of_uneven_batches(num_rows, batch_size, num_replicas, compiled) -> None:
    _assert_like_numpy(num_rows, batch_size, num_replicas, **compiled)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(num_rows=st.integers(1, 20), batch_size=st.integers(1, 9), num_replicas=st.integers(1, 3))
@example(num_rows=1, batch_size=9, num_replicas=3)
@pytest.mark.slow
def test_metrics_of_any_split(num_rows: int, batch_size: int, num_replicas: int) -> None:
    _assert_like_numpy(num_rows, batch_size, num_replicas)
