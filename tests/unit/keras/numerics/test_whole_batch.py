"""Losses and metrics whose examples depend on one another: the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.keras.numerics.step_mode import StepMode, step_mode
from tests.parity.comparison import Scope, assert_like_plain_keras, evaluated, fitted, mirrored

_NUM_ROWS = 7  # batches of 4 and 3: two replicas have 2 and 2 rows, then 2 and 1


def _accuracy(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.cast(ops.argmax(y_true, -1) == ops.argmax(y_pred, -1), "float32"))


def _root(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def _by_rows(y_true: Any, y_pred: Any) -> Any:
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


class _MeanOfRoots(keras.metrics.Mean):
    """Takes one number of a batch itself, and leaves the average over batches to Keras."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(_root(y_true, y_pred), sample_weight=None)


class _Dice(keras.metrics.Metric):
    """A ratio over a batch, and a count of batches."""

    def __init__(self, name: str = "own_dice") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", dtype="int32", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        both = ops.sum(y_true * y_pred)
        self.total.assign_add(2.0 * both / (ops.sum(y_true) + ops.sum(y_pred)))
        self.batches.assign_add(ops.ones((), "int32"))

    def result(self) -> Any:
        return self.total / ops.cast(self.batches, "float32")


class _Largest(keras.metrics.Metric):
    """A maximum, which is no sum, from a state that is not zero."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), keras.initializers.Constant(-3.0), name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_pred - y_true)))

    def reset_state(self) -> None:
        self.value.assign(ops.full((), -3.0))

    def result(self) -> Any:
        return self.value.value


def _pairs(y_true: Any, y_pred: Any) -> Any:
    """In-batch negatives: each row against all."""
    logits = ops.matmul(y_pred, ops.transpose(y_true))
    return -ops.diagonal(ops.log_softmax(logits, axis=-1))


def _by_columns(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), axis=0)


def _circle(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.circle(ops.argmax(y_true, axis=-1), ops.normalize(y_pred))


def _data(num_rows: int = _NUM_ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(3)
    x = random.standard_normal((num_rows, 3)).astype("float32")
    return x, np.eye(3, dtype="float32")[random.randint(0, 3, num_rows)]


def _job(
    loss: Any, metrics: Callable[[], list[Any]] = list, **compile_arguments: Any
) -> Callable[[Scope], dict[str, Any]]:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = _data()
        with scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(3, "softmax", kernel_initializer="ones")]
            )
            optimizer = keras.optimizers.SGD(0.25)
            model.compile(optimizer, loss, metrics=metrics(), **compile_arguments)
        return fitted(model, x, y, batch_size=4) | evaluated(model, x, y, batch_size=4)

    return job


def _constant(y_true: Any, y_pred: Any) -> Any:
    return ops.full((), 0.25)


def _all_metrics() -> list[Any]:
    functions = [_accuracy, _root, _by_rows, _constant]
    return [*functions, _MeanOfRoots(name="roots"), _Dice(), _Largest()]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_metrics_that_are_one_number_a_batch(replicas: int) -> None:
    measured = assert_like_plain_keras(_job("mse", _all_metrics), replicas=(replicas,))
    assert len({key for key in measured if key.startswith("evaluate")}) == 8


@pytest.mark.slow
def test_metrics_that_are_one_number_a_batch_in_eager_replicas_and_many_steps() -> None:
    expected = assert_like_plain_keras(_job("mse", _all_metrics, steps_per_execution=2))
    assert expected
    assert_like_plain_keras(_job("mse", _all_metrics, run_eagerly=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        _pairs,
        pytest.param(keras.losses.Dice(), id="dice", marks=pytest.mark.slow),
        pytest.param(lambda t, p: ops.sum(ops.square(t - p)), id="sum"),
        pytest.param(
            lambda t, p: ops.mean(ops.square(t - p), axis=0), id="axis", marks=pytest.mark.slow
        ),
        pytest.param(_root, id="root"),
        pytest.param(keras.losses.Tversky(), id="tversky", marks=pytest.mark.slow),
        pytest.param(_circle, id="circle", marks=pytest.mark.slow),
    ],
)
def test_loss_of_examples_that_depend_on_one_another(loss: Any) -> None:
    assert_like_plain_keras(_job(loss), replicas=(2,))


class _PairsLoss(keras.losses.Loss):
    """In-batch negatives, one loss for each row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return _pairs(y_true, y_pred)


@pytest.mark.parametrize("mode", [StepMode.OWN, StepMode.MEAN])
def test_loss_of_pairs_in_a_step_of_ones_own_is_a_warning(mode: StepMode) -> None:
    strategy, loss = mirrored(2), _PairsLoss(reduction=None, name="pairs")

    def step(x: Any, y: Any) -> Any:
        with step_mode(mode):
            return loss(y, x)

    (batch,) = strategy.distribute_dataset([_data(4)])
    with pytest.warns(
        UserWarning, match=r"'pairs' compares examples with one another.*\n.*\nFix: gather"
    ):
        strategy.run(step, args=batch)


def test_loss_of_gathered_pairs_is_no_warning() -> None:
    strategy, loss = mirrored(2), _PairsLoss(reduction=None)

    def step(x: Any, y: Any) -> Any:
        return loss(sg.all_gather(y), sg.all_gather(x))

    x, y = _data(4)
    (batch,) = strategy.distribute_dataset([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = strategy.run(step, args=batch)
    for part in strategy.local_results(values):
        np.testing.assert_allclose(part, np.asarray(_pairs(y, x)), rtol=1e-5)
