"""Batch normalisation in replicas: statistics of each or of all, of true rows and positions."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.keras.numerics.step_mode import StepMode, step_mode
from tests.contract.parts import seldom_eager
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import components_of, per_replica, values_of

_ROWS = np.asarray([[1, 0], [3, 5], [8, 2], [4, 4], [9, 7]], "float32")
_MOMENTUM = 0.75


def _split(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array[: sum(sizes)], np.cumsum(sizes)[:-1])


def _normalised(rows: np.ndarray, epsilon: float = 1e-3) -> np.ndarray:
    axes = tuple(range(rows.ndim - 1))
    return (rows - rows.mean(axes)) / np.sqrt(rows.var(axes) + epsilon)


def _layer(strategy: Any, shape: tuple[int | None, ...] = (None, 2), **arguments: Any) -> Any:
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=_MOMENTUM, **arguments)
        layer.build(shape)
    return layer


def _call(layer: Any, sizes: tuple[int, ...], rows: np.ndarray = _ROWS, **arguments: Any) -> Any:
    """Returns what the layer makes of each replica's rows in training, true rows only."""
    strategy = layer.gamma.distribute_strategy
    outputs = strategy.run(
        lambda part: layer(part, training=True, **arguments),
        args=(per_replica(strategy, _split(rows, sizes)),),
    )
    return [np.asarray(part) for part in strategy.local_results(outputs)]


@pytest.mark.compatibility
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 0)])
@seldom_eager
def test_each_replica_normalises_with_its_own_true_rows(sizes, execution) -> None:
    layer = _layer(mirrored(len(sizes)))
    parts = _split(_ROWS, sizes)
    for output, part in zip(_call(layer, sizes), parts, strict=True):
        expected = _normalised(part) if len(part) else part
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    kept = [_MOMENTUM * 0 + (1 - _MOMENTUM) * p.mean(0) if len(p) else np.zeros(2) for p in parts]
    np.testing.assert_allclose(components_of(layer.moving_mean), kept, rtol=1e-5)
    spread = [_MOMENTUM + (1 - _MOMENTUM) * p.var(0) if len(p) else np.ones(2) for p in parts]
    np.testing.assert_allclose(components_of(layer.moving_variance), spread, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(layer.moving_mean.value), np.mean(kept, 0), rtol=1e-5)


def test_statistics_of_an_island_without_rows_stay() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    strategy = sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2)
    layer = _layer(strategy, synchronized=True)
    outputs = np.concatenate(_call(layer, (3, 2, 0, 0)))
    np.testing.assert_allclose(outputs, _normalised(_ROWS), rtol=1e-4, atol=1e-5)
    moved, kept = 0.25 * _ROWS.mean(0), np.zeros(2)
    means = components_of(layer.moving_mean)
    np.testing.assert_allclose(means, [moved, moved, kept, kept], rtol=1e-5)
    moved, kept = 0.75 + 0.25 * _ROWS.var(0), np.ones(2)
    variances = components_of(layer.moving_variance)
    np.testing.assert_allclose(variances, [moved, moved, kept, kept], rtol=1e-5)


_SEQUENCES = np.random.RandomState(3).uniform(-2, 5, (5, 4, 2)).astype("float32")
_MASK = np.arange(4)[None, :] < np.asarray([4, 1, 3, 2, 4])[:, None]


@pytest.mark.compatibility
@pytest.mark.parametrize("is_synchronized", [False, True])
def test_masked_positions_do_not_count(is_synchronized: bool) -> None:
    sizes = (3, 2, 0)
    strategy = mirrored(3)
    layer = _layer(strategy, (None, 4, 2), synchronized=is_synchronized)
    strategy.run(
        lambda rows, mask: layer(rows, training=True, mask=mask),
        args=[per_replica(strategy, _split(array, sizes)) for array in (_SEQUENCES, _MASK)],
    )
    if is_synchronized:
        means = [_SEQUENCES[_MASK].mean(0)] * 3
    else:
        means = [_SEQUENCES[:3][_MASK[:3]].mean(0), _SEQUENCES[3:][_MASK[3:]].mean(0), np.zeros(2)]
    np.testing.assert_allclose(
        components_of(layer.moving_mean), np.multiply(0.25, means), rtol=1e-5
    )


def test_renormalisation_of_a_replica_without_rows_changes_nothing() -> None:
    if "renorm" not in keras.layers.BatchNormalization().get_config():
        pytest.skip("this version of Keras has no batch renormalisation")
    layer = _layer(mirrored(3), renorm=True)
    before = [components_of(variable) for variable in layer.non_trainable_variables]
    _call(layer, (3, 2, 0))
    after = [components_of(variable) for variable in layer.non_trainable_variables]
    assert len(after) == 5
    for old, new in zip(before, after, strict=True):
        assert new[2] == old[2]
        assert np.isfinite(new).all()
    assert after[0][0] != before[0][0]


@pytest.mark.compatibility
@pytest.mark.parametrize("is_synchronized", [False, True])
def test_frozen_layer_uses_and_keeps_its_moving_statistics(is_synchronized: bool) -> None:
    layer = _layer(mirrored(2), synchronized=is_synchronized)
    layer.trainable = False
    outputs = np.concatenate(_call(layer, (3, 2)))
    np.testing.assert_allclose(outputs, _ROWS / np.sqrt(1.001), rtol=1e-5)
    assert components_of(layer.moving_mean) == [[0.0, 0.0]] * 2


def test_layer_of_no_strategy_is_that_of_keras() -> None:
    for arguments in ({}, {"synchronized": True}):
        layer = keras.layers.BatchNormalization(momentum=_MOMENTUM, **arguments)
        outputs = np.asarray(layer(_ROWS, training=True))
        np.testing.assert_allclose(outputs, _normalised(_ROWS), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(layer.moving_mean.value), 0.25 * _ROWS.mean(0))
        assert layer.synchronized == bool(arguments)


@pytest.mark.compatibility
def test_channels_first_and_half_precision() -> None:
    images = np.random.RandomState(5).uniform(0, 3, (4, 2, 3, 3)).astype("float32")
    layer = _layer(mirrored(3), (None, 2, 3, 3), axis=1, synchronized=True)
    outputs = np.concatenate(_call(layer, (2, 2, 0), images))
    expected = np.moveaxis(_normalised(np.moveaxis(images, 1, -1)), -1, 1)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    layer = _layer(mirrored(2), synchronized=True, dtype="mixed_bfloat16")
    outputs = np.concatenate(_call(layer, (3, 2)))
    assert outputs.dtype == "bfloat16"  # of statistics of full precision
    np.testing.assert_allclose(np.asarray(layer.moving_mean.value), 0.25 * _ROWS.mean(0), rtol=1e-5)
    np.testing.assert_allclose(outputs.astype("float32"), _normalised(_ROWS), rtol=3e-2, atol=3e-2)


# Losses whose examples depend on one another.


def _pairs(y_true: Any, y_pred: Any) -> Any:
    """In-batch negatives: each row against all."""
    logits = ops.matmul(y_pred, ops.transpose(y_true))
    return -ops.diagonal(ops.log_softmax(logits, axis=-1))


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(3)
    x = random.standard_normal((4, 3)).astype("float32")
    return x, np.eye(3, dtype="float32")[random.randint(0, 3, 4)]


class _Scaled(keras.layers.BatchNormalization):
    """A subclass with an argument of its own."""

    def __init__(self, factor: float = 2.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.factor = factor

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training, mask=mask) * self.factor


def test_clone_of_a_subclass_in_the_scope_keeps_true_rows_and_synchronisation() -> None:
    layer = _Scaled(factor=3.0, momentum=_MOMENTUM, synchronized=True)
    model = keras.Sequential([keras.Input((2,)), layer])

    def cloned_layer(layer: Any) -> Any:
        factor = {"factor": 3.0} if type(layer) is _Scaled else {}
        return type(layer).from_config(layer.get_config() | factor)

    with mirrored(3).scope():
        cloned = keras.models.clone_model(model, clone_function=cloned_layer)
    outputs = np.concatenate(_call(cloned.layers[0], (3, 2, 0)))
    np.testing.assert_allclose(outputs, 3.0 * _normalised(_ROWS), rtol=1e-4, atol=1e-5)
    assert values_of(layer.weights)[2].tolist() == [0.0, 0.0]


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

    (batch,) = strategy.distribute_dataset([_data()])
    words = r"'pairs' compares examples with one another.*\n.*\nFix: gather"
    with pytest.warns(UserWarning, match=words):
        strategy.run(step, args=batch)


def test_loss_of_gathered_pairs_is_no_warning() -> None:
    strategy, loss = mirrored(2), _PairsLoss(reduction=None)

    def step(x: Any, y: Any) -> Any:
        return loss(sg.all_gather(y), sg.all_gather(x))

    x, y = _data()
    (batch,) = strategy.distribute_dataset([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = strategy.run(step, args=batch)
    for part in strategy.local_results(values):
        np.testing.assert_allclose(part, np.asarray(_pairs(y, x)), rtol=1e-5)


# Keras loss objects in replicas: in a step of one's own, and with batches that are padded.

_TARGETS = np.asarray([[1, 2], [0, 1], [3, 3], [5, 1], [2, 2]], "float32")
_PREDICTED = np.asarray([[2, 2], [1, 3], [0, 3], [5, 0], [4, 2]], "float32")
_WEIGHTS = np.asarray([1.0, 0.5, 2.0, 0.0, 3.0], "float32")


class _WithMask(keras.layers.Layer):
    """Hands on its first input with the second one as the Keras mask."""

    def call(self, inputs: Any) -> Any:
        return inputs[0] + 0.0

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return inputs[1]


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


def test_shares_of_masked_values_add_up_to_the_loss_of_one_device() -> None:
    # One value an element and a mask of elements: replicas keep 3, 1 and 2 of theirs.
    class Squares(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.square(y_true - y_pred)

    mask = np.asarray([[1, 1], [0, 1], [0, 1], [0, 0], [1, 1]], bool)
    squares = (_TARGETS - _PREDICTED) ** 2
    shares = _losses(Squares(), (2, 2, 1), mode=StepMode.SHARE, mask=mask)
    np.testing.assert_allclose(sum(shares), squares[mask].mean(), rtol=1e-6)
    mean = keras.losses.MeanSquaredError()  # no nan where there are no examples
    for mode in (StepMode.SHARE, StepMode.MEAN):
        assert _losses(mean, (3, 2, 0), mode=mode)[2] == 0.0


def test_losses_without_reduction_are_of_true_rows_only(execution: str) -> None:
    loss = keras.losses.MeanSquaredError(reduction=None)
    mask = np.asarray([True, False, True, True, False])
    parts = _losses(loss, (3, 2), mode=StepMode.OWN, weights=_WEIGHTS, mask=mask)
    expected = np.mean((_TARGETS - _PREDICTED) ** 2, axis=1) * _WEIGHTS * mask
    assert [len(part) for part in parts] == [3, 2]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("reduction", "sizes", "warns"),
    [
        ("sum_over_batch_size", (3, 2), True),
        ("mean_with_sample_weight", (3, 2), True),
        ("sum_over_batch_size", (5,), False),
        ("sum", (3, 2), False),
    ],
)
def test_averaging_loss_in_a_step_of_ones_own_warns(reduction, sizes, warns) -> None:
    loss = keras.losses.MeanSquaredError(reduction=reduction, name="averaging")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        means = _losses(loss, sizes, mode=StepMode.OWN)
    words = "The loss 'averaging' averages over this replica's"
    assert sum(words in str(one.message) for one in caught) == warns
    per_row = np.split(np.mean((_TARGETS - _PREDICTED) ** 2, axis=1), np.cumsum(sizes)[:-1])
    expected = [np.sum(part) if reduction == "sum" else np.mean(part) for part in per_row]
    np.testing.assert_allclose(means, expected, rtol=1e-6)


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
