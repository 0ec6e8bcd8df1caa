"""Mixtures of local and global weights, and the global values of variables with local copies."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import DiLoCo, StreamingDiLoCo
from stratagem.keras.numerics.local_weights import mixed, read_global


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_mixture_has_the_share_of_the_own_weights(share) -> None:
    own, whole = jnp.asarray([1.0, -2.0]), jnp.asarray([3.0, 4.0])
    (found,) = mixed([own], [whole], StreamingDiLoCo(own_share=share))
    np.testing.assert_allclose(found, share * own + (1 - share) * whole)


def test_mixture_keeps_the_dtype_of_the_own_weights() -> None:
    own, whole = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    (found,) = mixed([own], [whole], StreamingDiLoCo(own_share=0.5))
    assert found.dtype == jnp.bfloat16


def test_without_mixing_the_global_weights_are_taken() -> None:
    whole = jnp.ones(2)
    (found,) = mixed([jnp.zeros(2)], [whole], DiLoCo())
    assert found is whole


def test_global_values_are_those_of_the_variables_and_not_of_their_copies() -> None:
    with sg.LocalUpdateStrategy(DiLoCo(), ["cpu:0", "cpu:1"]).scope():
        variable = keras.Variable(np.ones(2, "float32"))
        keras.optimizers.SGD().build([variable])
    variable.local_copy.assign(np.zeros(2))
    ((value,), (state,)) = read_global([variable])
    np.testing.assert_array_equal(value, [1, 1])
    assert list(state) == ["outer_momentum"]
