"""Models and data of the tests of optimizers whose variables are on parameter servers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg

NUM_STEPS = 5
NUM_ROWS = 9000  # times 8: large enough for rows to be asked for
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM_STEPS, 8, 6)).astype("float32")
Y = RNG.normal(size=(NUM_STEPS, 8, 2)).astype("float32")


def dense_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])


def table_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    table = layers.Embedding(NUM_ROWS, 8, name="table")
    return keras.Sequential(
        [layers.Input((3,), dtype="int32"), table, layers.Flatten(), layers.Dense(2)]
    )


def gradients_of(model: Any, x: Any, y: Any) -> tuple[Any, list[Any]]:
    def loss() -> Any:
        return jnp.mean(jnp.square(model(x, training=True) - y))

    return sg.value_and_grad(loss, model.trainable_variables)


def assert_same(served: Any, alone: Any, **tolerance: float) -> None:
    for one, other in zip(served, alone, strict=True):
        np.testing.assert_allclose(
            np.asarray(one.value),
            np.asarray(other.value),
            **{"rtol": 1e-4, "atol": 1e-6, **tolerance},
            err_msg=one.path,
        )
