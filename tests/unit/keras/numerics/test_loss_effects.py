"""Dependence of losses on the rows of a batch, as their names and their programs show it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.analysis.row_effects import RowEffect
from stratagem.execution.context.replica import ReplicaBatch, ReplicaContext
from stratagem.keras.numerics.metrics import effect_of_loss, is_by_rows, is_of_keras

SIZE = 4


def own_loss(function: Any) -> keras.losses.Loss:
    class OwnLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return OwnLoss(reduction=None)


def effect(loss: keras.losses.Loss, shape: tuple[int, ...] = (SIZE, 3)) -> RowEffect:
    strategy: Any = sg.get_strategy()
    context = ReplicaContext(strategy, batch=ReplicaBatch(size=SIZE))
    return effect_of_loss(loss, np.ones(shape, np.float32), np.ones(shape, np.float32), context)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1), RowEffect.ROWS),
        (lambda y, p: keras.ops.sum((y - p) ** 2), RowEffect.SUM),
        (lambda y, p: keras.ops.mean(y * p), RowEffect.MEAN),
        (lambda y, p: keras.ops.sum(y * p, axis=0), RowEffect.MIXED),
        (lambda y, p: keras.ops.max(p, axis=0), RowEffect.MIXED),
    ],
    ids=["rows", "sum", "mean", "several sums", "largest"],
)
def test_loss_of_ones_own_is_followed(function, expected) -> None:
    assert effect(own_loss(function)) is expected


def test_losses_of_keras_by_rows_and_arrays_without_rows_are_left_to_keras() -> None:
    assert effect(keras.losses.MeanSquaredError()) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), (SIZE + 1, 3)) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), ()) is RowEffect.UNKNOWN


def test_functions_of_keras_are_known_by_their_module() -> None:
    assert is_of_keras(keras.losses.mean_squared_error)
    assert is_of_keras(keras.losses.MeanSquaredError())
    assert not is_of_keras(own_loss)
    assert not is_of_keras(own_loss(len))


def test_functions_of_keras_that_mix_rows_are_the_exceptions() -> None:
    assert is_by_rows(keras.losses.mean_squared_error)
    assert not is_by_rows(keras.losses.dice)
    assert not is_by_rows(own_loss)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("circle", marks=pytest.mark.slow),
        "dice",
        "tversky",
        "mean_absolute_error",
        "huber",
    ],
)
def test_exceptions_are_the_losses_whose_rows_change_with_other_rows(name) -> None:
    """Changes one row of the predictions, and looks at the value of another."""
    function = getattr(keras.losses, name)
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 0, 1]) if name == "circle" else rng.integers(0, 2, (SIZE, 3))
    predictions = rng.random((SIZE, 3)).astype(np.float32)
    first = np.asarray(function(labels, predictions))
    predictions[1] = 1 - predictions[1]
    second = np.asarray(function(labels, predictions))
    depends = first.shape != (SIZE,) or not np.allclose(first[[0, 2, 3]], second[[0, 2, 3]])
    assert is_by_rows(function) is not depends
