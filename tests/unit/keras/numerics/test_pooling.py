"""Max pooling on CPU: values and derivatives are those of XLA's own, ties included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.keras.numerics import pooling
from tests.parity.comparison import Scope, assert_like_plain_keras, fitted, mirrored

_SHAPES_AND_WINDOWS = [
    ((3, 9, 3), (2,)),
    pytest.param((1, 30, 2), (15,), marks=pytest.mark.slow),
    pytest.param((2, 8, 8, 4), (2, 2), marks=pytest.mark.slow),
    pytest.param((2, 7, 9, 3), (2, 3), marks=pytest.mark.slow),
    pytest.param((2, 6, 5, 4, 2), (2, 2, 2), marks=pytest.mark.slow),
    # More places than a byte counts.
    pytest.param((1, 12, 12, 1), (12, 12), marks=pytest.mark.slow),
]


def _reference(inputs: Any, window: tuple[int, ...]) -> Any:
    extents = (1, *window, 1)
    return jax.lax.reduce_window(inputs, -jnp.inf, jax.lax.max, extents, extents, "VALID")


def _with_ties(shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape), "float32")


@pytest.mark.parametrize(
    ("shape", "window"),
    _SHAPES_AND_WINDOWS,
)
def test_values_and_gradients_are_those_of_xla(
    shape: tuple[int, ...], window: tuple[int, ...]
) -> None:
    inputs = _with_ties(shape)
    expected, expected_gradient = jax.vjp(lambda x: _reference(x, window), inputs)
    values, gradient = jax.vjp(lambda x: pooling.max_of_windows(x, window), inputs)
    np.testing.assert_array_equal(values, expected)
    incoming = jnp.arange(1.0, expected.size + 1).reshape(expected.shape)
    np.testing.assert_array_equal(gradient(incoming)[0], expected_gradient(incoming)[0])


@pytest.mark.slow
def test_forward_and_second_derivatives_exist() -> None:
    inputs, tangent = _with_ties((2, 4, 4, 1)), jnp.arange(32.0).reshape(2, 4, 4, 1)
    _, expected = jax.jvp(lambda x: _reference(x, (2, 2)), (inputs,), (tangent,))
    _, computed = jax.jvp(lambda x: pooling.max_of_windows(x, (2, 2)), (inputs,), (tangent,))
    np.testing.assert_array_equal(computed, expected)

    def cubes(values: Any) -> Any:
        return jnp.sum(pooling.max_of_windows(values.reshape(1, 4, 1), (2,)) ** 3)

    np.testing.assert_array_equal(jax.hessian(cubes)(jnp.arange(4.0)), np.diag([0, 6, 0, 18]))


def _primitives(layer: Any, shape: tuple[int, ...]) -> str:
    """The program of a layer's gradient in a replica, as text."""
    found: list[str] = []
    strategy = mirrored(2)
    inputs = jnp.ones(shape)

    def step() -> Any:
        loss = lambda x: jnp.sum(layer(x))  # noqa: E731
        found.append(str(jax.make_jaxpr(jax.grad(loss))(inputs)))

    strategy.run(step)
    return found[0]


@pytest.mark.parametrize(
    ("layer", "shape", "is_fast"),
    [
        (keras.layers.MaxPooling1D(2), (1, 6, 1), True),
        (keras.layers.MaxPooling2D(2), (1, 5, 4, 1), True),
        (keras.layers.MaxPooling3D(2), (1, 4, 4, 4, 1), True),
        (keras.layers.MaxPooling2D(2, padding="same"), (1, 4, 4, 1), True),
        (keras.layers.MaxPooling2D(2, padding="same"), (1, 5, 4, 1), False),
        (keras.layers.MaxPooling2D(3, strides=2), (1, 5, 5, 1), False),
        (keras.layers.MaxPooling2D(2, data_format="channels_first"), (1, 1, 4, 4), False),
        (keras.layers.AveragePooling2D(2), (1, 4, 4, 1), None),
    ],
)
def test_layers_whose_windows_lie_side_by_side_are_fast(
    layer: Any, shape: tuple[int, ...], is_fast: bool | None
) -> None:
    program = _primitives(layer, shape)
    assert ("select_and_scatter" in program) is (is_fast is False)


def test_outside_a_strategy_pooling_is_keras_own() -> None:
    layer = keras.layers.MaxPooling2D(2)
    gradient = jax.grad(lambda x: jnp.sum(layer(x)))
    assert "select_and_scatter" in str(jax.make_jaxpr(gradient)(jnp.ones((1, 4, 4, 1))))


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.slow
def test_convolutional_model_with_pooling_trains_as_one_device_does(
    steps_per_execution: int,
) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        draw = np.random.default_rng(3)
        x, y = draw.normal(size=(10, 9, 8, 1)).astype("float32"), np.arange(10, dtype="int32") % 3
        with scope():
            model = keras.Sequential(
                [
                    keras.Input((9, 8, 1)),
                    keras.layers.Conv2D(3, 2, activation="tanh"),
                    keras.layers.MaxPooling2D(),
                    keras.layers.Flatten(),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(
                optimizer=keras.optimizers.SGD(0.1),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=steps_per_execution,
            )
        return fitted(model, x, y, batch_size=5)

    assert_like_plain_keras(job, replicas=(1, 2))
