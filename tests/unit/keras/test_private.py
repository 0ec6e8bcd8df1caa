"""Private names of Keras, compared with what Keras does in public."""

from __future__ import annotations

import jax
import keras
import numpy as np

from stratagem.keras import private


def test_names_are_restored() -> None:
    name = keras.layers.Dense(1).name
    with private.fresh_names():
        assert keras.layers.Dense(1).name == "dense"
    assert keras.layers.Dense(1).name != name


def test_masks_of_earlier_traces_are_forgotten_in_a_step() -> None:
    def step(x: jax.Array) -> jax.Array:
        private.set_keras_mask(x, x > 0)
        with private.fresh_masks():
            assert private.get_keras_mask(x) is None
            private.set_keras_mask(x, x < 0)
        return private.get_keras_mask(x)

    np.testing.assert_array_equal(jax.jit(step)(np.array([-1.0, 1.0])), [False, True])
