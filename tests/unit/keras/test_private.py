"""Private names of Keras, compared with what Keras does in public."""

from __future__ import annotations

import jax
import keras
import numpy as np

from stratagem.keras import private


def _model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_metrics_are_unbuilt_until_a_batch_is_known() -> None:
    model = _model()
    assert private.has_unbuilt_metrics(model)
    spec = keras.KerasTensor((4, 2), "float32")
    private.build_metrics(model, keras.KerasTensor((4, 3), "float32"), spec, spec, None)
    assert not private.has_unbuilt_metrics(model)
    assert list(private.named_metrics(model)) == ["mae"]


def test_seed_and_names_are_restored() -> None:
    keras.utils.set_random_seed(3)
    keras.random.uniform((1,))  # creates the default generator
    before = private.global_seed_state()
    drawn = np.asarray(keras.random.uniform((2,)))
    private.set_global_seed_state(before)
    np.testing.assert_array_equal(keras.random.uniform((2,)), drawn)
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
