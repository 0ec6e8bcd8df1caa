"""Layers that write state of their own in a step of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from tests.parity.comparison import Scope, differences, fitted, mirrored, plain_keras, regression
from tests.unit.keras.replicas import components_of, copies_of, values_of


def _trained(scope: Scope, layer: Callable[[], Any], **compile_arguments: Any) -> Any:
    with scope():
        made = layer()
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), made, dense])
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", **compile_arguments)
    return model, made


class _Counts(keras.layers.Layer):
    """Counts calls in one variable and rows in another, each by its aggregation."""

    def build(self, input_shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")
        self.largest = self.add_weight(
            shape=(), trainable=False, aggregation="mean", initializer="zeros", name="largest"
        )
        self.own = keras.Variable(
            jnp.zeros(()), trainable=False, synchronization="on_read", aggregation="sum"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            self.largest.assign(keras.ops.max(inputs))
            self.own.assign_add(keras.ops.sum(inputs))
        return inputs


@pytest.mark.compatibility
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_state_of_a_layer_follows_its_annotations(steps_per_execution: int) -> None:
    x, y = regression(12)
    model, layer = _trained(
        lambda: mirrored(2).scope(), _Counts, steps_per_execution=steps_per_execution
    )
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert [int(copy) for copy in copies_of(layer.calls)] == [3, 3]
    np.testing.assert_allclose(
        float(layer.largest.value), (x[8:10].max() + x[10:].max()) / 2, rtol=1e-6
    )
    first = np.concatenate([x[0:2], x[4:6], x[8:10]]).sum()
    np.testing.assert_allclose(components_of(layer.own), [first, x.sum() - first], rtol=1e-5)
    np.testing.assert_allclose(float(layer.own.value), x.sum(), rtol=1e-5)


class _Drifts(keras.layers.Layer):
    """Keeps the mean of its inputs, which differs between replicas, without saying how."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros", name="mean")

    def call(self, inputs: Any) -> Any:
        self.mean.assign(keras.ops.mean(inputs))
        return inputs


@pytest.mark.compatibility
def test_state_that_would_drift_apart_is_refused() -> None:
    model, layer = _trained(lambda: mirrored(2).scope(), _Drifts)
    with pytest.raises(
        ValueError, match="mean', whose aggregation is NONE, a value that may differ"
    ):
        model.fit(*regression(), batch_size=4, verbose=0)
    assert values_of([layer.mean]) == [0.0]


@pytest.mark.slow
def test_spectral_normalisation_is_that_of_one_device() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        model, _ = _trained(scope, lambda: keras.layers.SpectralNormalization(_square()))
        return fitted(model, x, y, batch_size=4)

    def _square() -> Any:
        return keras.layers.Dense(3, kernel_initializer=keras.initializers.Orthogonal(2.0, seed=3))

    expected = plain_keras(job)
    assert differences(plain_keras(lambda _: job(mirrored(2).scope)), expected) == []


@pytest.mark.slow
def test_adapted_normalisation_is_that_of_one_device() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            layer = keras.layers.Normalization()
            layer.adapt(x)
        model, _ = _trained(scope, lambda: layer)
        return fitted(model, x, y, batch_size=4)

    expected = plain_keras(job)
    assert differences(plain_keras(lambda _: job(mirrored(2).scope)), expected) == []
