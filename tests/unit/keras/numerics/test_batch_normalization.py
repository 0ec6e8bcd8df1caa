"""Batch normalisation in replicas: statistics of each or of all, of true rows and positions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    mirrored,
    regression,
    with_known_weights,
)
from tests.unit.keras.replicas import components_of, per_replica, values_of

_ROWS = np.asarray([[1, 0], [3, 5], [8, 2], [4, 4], [9, 7]], "float32")
# How the rows lie on replicas: alike, with a short part, with a replica without any.
_SIZES = {"even": (2, 2), "short": (3, 2), "empty": (3, 2, 0)}
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
@pytest.mark.parametrize("name", _SIZES)
@pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=pytest.mark.slow)], indirect=True
)
def test_each_replica_normalises_with_its_own_true_rows(name: str, execution: str) -> None:
    sizes = _SIZES[name]
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


@pytest.mark.compatibility
@pytest.mark.parametrize("name", _SIZES)
@pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=pytest.mark.slow)], indirect=True
)
def test_synchronized_replicas_normalise_with_the_rows_of_all(name: str, execution: str) -> None:
    sizes = _SIZES[name]
    layer = _layer(mirrored(len(sizes)), synchronized=True)
    rows = _ROWS[: sum(sizes)]
    outputs = np.concatenate(_call(layer, sizes))
    np.testing.assert_allclose(outputs, _normalised(rows), rtol=1e-4, atol=1e-5)
    for component in components_of(layer.moving_mean):
        np.testing.assert_allclose(component, 0.25 * rows.mean(0), rtol=1e-5)
    for component in components_of(layer.moving_variance):
        np.testing.assert_allclose(component, 0.75 + 0.25 * rows.var(0), rtol=1e-5)


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


def _network(*, is_synchronized: bool) -> tuple[Any, Any]:
    # Plain Keras refuses synchronized=True on JAX; on one device it means nothing.
    # Four features: no gradient has as many rows as a replica, which would be taken for a batch.
    dense = keras.layers.Dense(4, kernel_initializer=keras.initializers.Orthogonal(seed=4))
    norm = keras.layers.BatchNormalization(**({"synchronized": True} if is_synchronized else {}))
    model = keras.Sequential([keras.Input((2,)), dense, norm, keras.layers.Activation("tanh")])
    return model, [dense.kernel, norm.gamma, norm.beta]


def _gradients_on_one_device() -> list[np.ndarray]:
    model, variables = _network(is_synchronized=False)
    _, gradients = sg.value_and_grad(
        lambda: keras.ops.sum(keras.ops.square(model(_ROWS, training=True) - 0.5)) / len(_ROWS),
        variables,
    )
    return [np.asarray(gradient) for gradient in gradients]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short", "empty"])
def test_gradients_through_synchronized_statistics_are_those_of_one_device(name: str) -> None:
    sizes = _SIZES[name]
    strategy = mirrored(len(sizes))
    with strategy.scope():
        model, variables = _network(is_synchronized=True)

    def step(rows: Any) -> Any:
        def loss() -> Any:
            squares = keras.ops.square(model(rows, training=True) - 0.5)
            return sg.compute_average_loss(keras.ops.sum(squares, axis=1))

        return sg.value_and_grad(loss, variables)[1]

    gradients = strategy.run(step, args=(per_replica(strategy, _split(_ROWS, sizes)),))
    summed = strategy.reduce("sum", gradients, axis=None)
    for gradient, expected in zip(summed, _gradients_on_one_device(), strict=True):
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-3, atol=1e-5)


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


@pytest.mark.compatibility
def test_channels_first_is_normalised_over_the_other_axes() -> None:
    images = np.random.RandomState(5).uniform(0, 3, (4, 2, 3, 3)).astype("float32")
    layer = _layer(mirrored(3), (None, 2, 3, 3), axis=1, synchronized=True)
    outputs = np.concatenate(_call(layer, (2, 2, 0), images))
    expected = np.moveaxis(_normalised(np.moveaxis(images, 1, -1)), -1, 1)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


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


def test_inference_uses_moving_statistics_without_changing_them() -> None:
    strategy = mirrored(2)
    layer = _layer(strategy)
    layer.moving_mean.assign([1.0, 2.0])
    part = per_replica(strategy, [_ROWS[:3], _ROWS[3:]])
    outputs = strategy.run(lambda rows: layer(rows, training=False), args=(part,))
    expected = (_ROWS - np.asarray([1.0, 2.0])) / np.sqrt(1.001)
    np.testing.assert_allclose(strategy.gather(outputs, axis=0), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(layer(_ROWS)), expected, rtol=1e-4, atol=1e-5)
    assert components_of(layer.moving_mean) == [[1.0, 2.0]] * 2


@pytest.mark.compatibility
def test_half_precision_rows_give_half_precision_outputs_of_full_precision_statistics() -> None:
    layer = _layer(mirrored(2), synchronized=True, dtype="mixed_bfloat16")
    outputs = _call(layer, (3, 2))
    assert outputs[0].dtype == "bfloat16"
    np.testing.assert_allclose(np.asarray(layer.moving_mean.value), 0.25 * _ROWS.mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate(outputs).astype("float32"), _normalised(_ROWS), rtol=3e-2, atol=3e-2
    )


def test_layer_of_no_strategy_is_that_of_keras() -> None:
    for arguments in ({}, {"synchronized": True}):
        layer = keras.layers.BatchNormalization(momentum=_MOMENTUM, **arguments)
        outputs = np.asarray(layer(_ROWS, training=True))
        np.testing.assert_allclose(outputs, _normalised(_ROWS), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(layer.moving_mean.value), 0.25 * _ROWS.mean(0))
        assert layer.synchronized == bool(arguments)


@pytest.mark.compatibility
@pytest.mark.parametrize("is_synchronized", [False, True])
def test_configuration_survives_a_round_trip(is_synchronized: bool) -> None:
    layer = keras.layers.BatchNormalization(
        axis=1, momentum=0.5, center=False, synchronized=is_synchronized, name="norm"
    )
    again = keras.layers.BatchNormalization.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.synchronized, again.momentum, again.center) == (is_synchronized, 0.5, False)


def test_cloned_model_in_the_scope_is_synchronized_too() -> None:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.BatchNormalization(momentum=_MOMENTUM, synchronized=True)]
    )
    with mirrored(3).scope():
        cloned = keras.models.clone_model(model)
    outputs = np.concatenate(_call(cloned.layers[0], (3, 2, 0)))
    np.testing.assert_allclose(outputs, _normalised(_ROWS), rtol=1e-4, atol=1e-5)
    assert values_of(model.layers[0].weights)[2].tolist() == [0.0, 0.0]


class _Scaled(keras.layers.BatchNormalization):
    """A subclass with an argument of its own."""

    def __init__(self, factor: float = 2.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.factor = factor

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training, mask=mask) * self.factor


def test_subclass_keeps_true_rows_and_synchronisation() -> None:
    with mirrored(2).scope():
        layer = _Scaled(factor=3.0, synchronized=True)
        layer.build((None, 2))
    outputs = np.concatenate(_call(layer, (3, 2)))
    np.testing.assert_allclose(outputs, 3.0 * _normalised(_ROWS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [True, False])
def test_synchronized_may_be_set_after_construction(is_inside) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            layer = keras.layers.BatchNormalization()
            model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
            with_known_weights(model).compile(optimizer="sgd", loss="mse")
            layer.synchronized = is_inside
        layer.synchronized = True
        return fitted(model, x, y)

    assert_like_plain_keras(job, replicas=(2,))
