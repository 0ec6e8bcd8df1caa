"""Coding of rows as bytes, against casts of NumPy and ml_dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stratagem.devices.compression import BFloat16, Float8, Float16, Int8
from stratagem.execution.compressed.sums import decode, encode

ROWS = (np.random.default_rng(0).normal(size=(3, 1000)) * np.logspace(-3, 2, 1000)).astype(
    np.float32
)


def coded(setting, rows, seed=0):
    payload = encode(setting, jnp.asarray(rows), jax.random.key(seed))
    assert payload.dtype == jnp.uint8
    assert payload.shape[1] == setting.number_bytes(rows.shape[1])
    return np.asarray(decode(setting, payload, rows.shape[1]))


def in_blocks(rows, width, largest):
    """Returns the rows in blocks, and the scale of each block."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(len(rows), -1, width)
    scales = np.abs(padded).max(-1, keepdims=True) / np.float32(largest)
    return padded, scales


@pytest.mark.parametrize(
    ("setting", "dtype"), [(BFloat16(), ml_dtypes.bfloat16), (Float16(), np.float16)]
)
def test_short_floats_are_those_of_numpy(setting, dtype) -> None:
    np.testing.assert_array_equal(coded(setting, ROWS), ROWS.astype(dtype).astype(np.float32))


def test_float16_cuts_what_it_cannot_hold() -> None:
    rows = np.float32([[1e6, -1e6, 3.0]])
    np.testing.assert_array_equal(coded(Float16(), rows), [[65504, -65504, 3]])


def test_int8_is_within_half_a_step() -> None:
    setting = Int8(block_elements=64, stochastic=False)
    blocks, scales = in_blocks(ROWS, 64, 127)
    expected = (np.round(blocks / scales) * scales).reshape(3, -1)[:, :1000]
    np.testing.assert_allclose(coded(setting, ROWS), expected, rtol=1e-6, atol=1e-7)


def test_float8_is_that_of_ml_dtypes() -> None:
    setting = Float8(block_elements=64, stochastic=False)
    blocks, scales = in_blocks(ROWS, 64, 448)
    short = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = (short * scales).reshape(3, -1)[:, :1000]
    np.testing.assert_allclose(coded(setting, ROWS), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Int8, Float8])
def test_stochastic_rounding_takes_a_neighbor_and_is_right_on_average(kind) -> None:
    rows, num_draws = ROWS[:1, :200], 400
    nearest = kind(stochastic=False)
    draws = np.stack([coded(kind(), rows, seed) for seed in range(num_draws)])
    _, scales = in_blocks(rows, 200, 127 if kind is Int8 else 448)
    scale = float(scales.max())
    scaled = np.abs(rows) / scale
    # The distance of neighbors: one for integers, and for floats an eighth of the power of two.
    step = 1.0 if kind is Int8 else 2.0 ** np.maximum(np.floor(np.log2(scaled)) - 3, -9)
    assert np.all(np.abs(draws - rows) <= 1.001 * step * scale)
    assert np.any(draws != coded(nearest, rows))
    error = np.abs(draws.mean(0) - rows)
    assert np.all(error <= 5 * step * scale / 2 / np.sqrt(num_draws))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(BFloat16(), marks=pytest.mark.slow),
        Float16(),
        pytest.param(Int8(), marks=pytest.mark.slow),
        pytest.param(Float8(), marks=pytest.mark.slow),
    ],
)
def test_zeros_and_short_rows_come_back(setting) -> None:
    rows = np.float32([[0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(coded(setting, rows), rows)
    np.testing.assert_array_equal(coded(setting, np.float32([[2.0]])), [[2.0]])
