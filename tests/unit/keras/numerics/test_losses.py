"""Keras loss objects in replicas: in a step of one's own, and with batches that are padded."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.numerics.step_mode import StepMode, step_mode
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import per_replica

_TARGETS = np.asarray([[1, 2], [0, 1], [3, 3], [5, 1], [2, 2]], "float32")
_PREDICTED = np.asarray([[2, 2], [1, 3], [0, 3], [5, 0], [4, 2]], "float32")
_WEIGHTS = np.asarray([1.0, 0.5, 2.0, 0.0, 3.0], "float32")


class _WithMask(keras.layers.Layer):
    """Hands on its first input with the second one as the Keras mask."""

    def call(self, inputs: Any) -> Any:
        return inputs[0] + 0.0

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return inputs[1]


def _split(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def _losses(
    loss: Any,
    sizes: tuple[int, ...],
    *,
    mode: StepMode,
    weights: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> list[Any]:
    """What a loss object gives on each replica, of which each holds some of the five rows."""
    strategy = mirrored(len(sizes))

    def step(targets: Any, predicted: Any, weight: Any, keep: Any) -> Any:
        if keep is not None:
            predicted = _WithMask()([predicted, keep])
        with step_mode(mode, []):
            return loss(targets, predicted, sample_weight=weight)

    arguments = [
        None if value is None else per_replica(strategy, _split(value, sizes))
        for value in (_TARGETS, _PREDICTED, weights, mask)
    ]
    return [np.asarray(part) for part in strategy.local_results(strategy.run(step, args=arguments))]


# Five rows: all of them, a short part, a replica without any.
_SIZES = [(3, 2), (2, 2, 1), (3, 2, 0)]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_shares_of_a_fit_step_add_up_to_the_loss_of_one_device(
    reduction: str, is_weighted: bool
) -> None:
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    weights = _WEIGHTS if is_weighted else None
    expected = float(loss(_TARGETS, _PREDICTED, sample_weight=weights))
    for sizes in _SIZES:
        shares = _losses(loss, sizes, mode=StepMode.SHARE, weights=weights)
        np.testing.assert_allclose(sum(shares), expected, rtol=1e-6, err_msg=str(sizes))


def test_shares_of_masked_values_add_up_to_the_loss_of_one_device() -> None:
    # One value an element and a mask of elements: replicas keep 3, 1 and 2 of theirs.
    class Squares(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.square(y_true - y_pred)

    mask = np.asarray([[1, 1], [0, 1], [0, 1], [0, 0], [1, 1]], bool)
    squares = (_TARGETS - _PREDICTED) ** 2
    shares = _losses(Squares(), (2, 2, 1), mode=StepMode.SHARE, mask=mask)
    np.testing.assert_allclose(sum(shares), squares[mask].mean(), rtol=1e-6)


def test_loss_in_a_mode_of_means_is_the_mean_of_the_replicas_own_examples() -> None:
    loss = keras.losses.MeanSquaredError()
    means = _losses(loss, (2, 2, 1), mode=StepMode.MEAN)
    per_row = np.mean((_TARGETS - _PREDICTED) ** 2, axis=1)
    expected = [per_row[:2].mean(), per_row[2:4].mean(), per_row[4]]
    np.testing.assert_allclose(means, expected, rtol=1e-6)


def test_loss_of_a_replica_without_examples_is_zero_and_no_nan() -> None:
    loss = keras.losses.MeanSquaredError()
    for mode in (StepMode.SHARE, StepMode.MEAN):
        assert _losses(loss, (3, 2, 0), mode=mode)[2] == 0.0


def test_losses_without_reduction_are_of_true_rows_only(execution: str) -> None:
    loss = keras.losses.MeanSquaredError(reduction=None)
    parts = _losses(loss, (3, 2), mode=StepMode.OWN, weights=_WEIGHTS)
    expected = np.mean((_TARGETS - _PREDICTED) ** 2, axis=1) * _WEIGHTS
    assert [len(part) for part in parts] == [3, 2]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-6)


def test_mask_of_padded_losses_leaves_elements_out() -> None:
    loss = keras.losses.MeanSquaredError(reduction=None)
    mask = np.asarray([True, False, True, True, False])
    parts = _losses(loss, (3, 2), mode=StepMode.OWN, mask=mask)
    expected = np.mean((_TARGETS - _PREDICTED) ** 2, axis=1) * mask
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_averaging_loss_in_a_step_of_ones_own_warns(reduction: str) -> None:
    loss = keras.losses.MeanSquaredError(reduction=reduction, name="averaging")
    with pytest.warns(UserWarning, match="The loss 'averaging' averages over this replica's"):
        means = _losses(loss, (3, 2), mode=StepMode.OWN)
    per_row = np.mean((_TARGETS - _PREDICTED) ** 2, axis=1)
    np.testing.assert_allclose(means, [per_row[:3].mean(), per_row[3:].mean()], rtol=1e-6)


def test_averaging_loss_warns_once_however_often_it_is_called() -> None:
    strategy = mirrored(2)
    loss = keras.losses.MeanSquaredError(name="often")
    parts = per_replica(strategy, [_TARGETS[:2], _TARGETS[2:4]])

    def step(rows: Any) -> Any:
        return loss(rows, rows + 1.0) + loss(rows, rows)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            strategy.run(step, args=(parts,))
        sizes_change = per_replica(strategy, [_TARGETS[:2], _TARGETS[2:3]])
        strategy.run(step, args=(sizes_change,))
    assert len([warning for warning in caught if "often" in str(warning.message)]) == 1


@pytest.mark.parametrize("reduction", [None, "none", "sum"])
def test_other_reductions_do_not_warn(reduction: str | None) -> None:
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    parts = _losses(loss, (3, 2), mode=StepMode.OWN)
    assert np.isfinite(np.concatenate([np.ravel(part) for part in parts])).all()


def test_averaging_loss_with_one_replica_does_not_warn() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    loss = keras.losses.MeanSquaredError()
    value = strategy.run(lambda: loss(jnp.asarray(_TARGETS), jnp.asarray(_PREDICTED)))
    np.testing.assert_allclose(float(value), np.mean((_TARGETS - _PREDICTED) ** 2), rtol=1e-6)


def test_loss_outside_every_scope_is_that_of_keras() -> None:
    value = keras.losses.MeanSquaredError()(_TARGETS, _PREDICTED, _WEIGHTS)
    expected = np.mean(np.mean((_TARGETS - _PREDICTED) ** 2, axis=1) * _WEIGHTS)
    np.testing.assert_allclose(float(value), expected, rtol=1e-6)


def test_loss_in_a_scope_is_computed_once_for_all_replicas() -> None:
    with mirrored(2).scope():
        value = keras.losses.MeanSquaredError()(_TARGETS, _PREDICTED)
    np.testing.assert_allclose(float(value), np.mean((_TARGETS - _PREDICTED) ** 2), rtol=1e-6)
