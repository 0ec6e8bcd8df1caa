"""Rows of initial values, against the whole of them."""

from __future__ import annotations

import pickle

import cloudpickle
import jax
import keras
import numpy as np
import pytest

from stratagem.keras.variables.initial_rows import InitialRows

INITIALIZERS = {
    "zeros": keras.initializers.Zeros(),
    "ones": keras.initializers.Ones(),
    "constant": keras.initializers.Constant(2.5),
    "uniform": keras.initializers.RandomUniform(-3.0, 1.0, seed=1),
    "normal": keras.initializers.RandomNormal(1.0, 2.0, seed=2),
    "truncated": keras.initializers.TruncatedNormal(1.0, 2.0, seed=3),
    "no seed": keras.initializers.RandomUniform(),
    "large seed": keras.initializers.RandomUniform(seed=2**31 + 5),
    "glorot uniform": keras.initializers.GlorotUniform(seed=4),
    "glorot normal": keras.initializers.GlorotNormal(seed=5),
    "he uniform": keras.initializers.HeUniform(seed=6),
    "lecun normal": keras.initializers.LecunNormal(seed=7),
    "scaled": keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
}


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"uniform", "normal"} else pytest.mark.slow)
        for name in INITIALIZERS
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (37, 5),
        pytest.param((64,), marks=pytest.mark.slow),
        pytest.param((9, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_whole(name, shape) -> None:
    initializer = INITIALIZERS[name]
    whole = np.asarray(initializer(shape, "float32"))
    rows = pickle.loads(cloudpickle.dumps(InitialRows(initializer, shape, "float32")))
    parts = [rows(first, min(4, shape[0] - first)) for first in range(0, shape[0], 4)]
    # The compiler may round differently in arrays of another shape.
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6, atol=1e-7)
    assert rows(0, 0).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_width_of_numbers(dtype) -> None:
    initializer = keras.initializers.RandomUniform(seed=1)
    whole = np.asarray(initializer((20, 3), dtype))
    got = InitialRows(initializer, (20, 3), dtype)(7, 5)
    assert got.dtype == whole.dtype
    np.testing.assert_array_equal(got, whole[7:12])


def test_numbers_of_64_bits() -> None:
    initializer = keras.initializers.RandomUniform(seed=1)
    with jax.enable_x64(True):
        whole = np.asarray(initializer((20, 3), "float64"))
        got = InitialRows(initializer, (20, 3), "float64")(7, 5)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, whole[7:12])


def test_next_key_of_a_generator_is_drawn_once() -> None:
    seeds = [keras.random.SeedGenerator(3) for _ in range(2)]
    ours, theirs = (keras.initializers.RandomUniform(seed=seed) for seed in seeds)
    rows = InitialRows(ours, (10, 2), "float32")
    np.testing.assert_array_equal(rows(2, 3), np.asarray(theirs((10, 2), "float32"))[2:5])
    np.testing.assert_array_equal(seeds[0].state.value, seeds[1].state.value)


def test_places_beyond_32_bits_count_on() -> None:
    """Two halves that meet where the lower half of the place begins anew."""
    rows = InitialRows(keras.initializers.RandomUniform(seed=1), (2**31, 4), "float32")
    first = 2**30 - 3
    np.testing.assert_array_equal(
        rows(first, 6), np.concatenate([rows(first, 3), rows(first + 3, 3)])
    )
    assert not np.array_equal(rows(first + 3, 3), rows(0, 3))


def test_numbers_of_derived_keys_are_refused(monkeypatch) -> None:
    def uniform(shape, seed, **_):
        return jax.random.uniform(jax.random.split(seed)[0], shape)

    monkeypatch.setattr(keras.random, "uniform", uniform)
    rows = InitialRows(keras.initializers.RandomUniform(seed=1), (4, 2), "float32")
    with pytest.raises(NotImplementedError, match="was to be drawn from a derived key"):
        rows(0, 2)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Orthogonal(),
        keras.initializers.Constant(np.ones((4, 2))),
        lambda shape, dtype: np.zeros(shape, dtype),
    ],
    ids=["orthogonal", "array", "function"],
)
def test_initializer_that_needs_the_whole_is_reported(initializer) -> None:
    with pytest.raises(NotImplementedError, match="which is made in parts"):
        InitialRows(initializer, (4, 2), "float32")
