"""Coding of float32 rows as bytes: shorter floats, and blocks of 8-bit numbers with a scale."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.compression import BFloat16, Compression, Float8, Float16, Int8

_LARGEST_INT8 = 127.0
_LARGEST_FLOAT8 = 448.0
_LARGEST_FLOAT16 = 65504.0
# Float8 (e4m3): 3 of float32's 23 bits of the fraction, and equal steps below its normal numbers.
_DROPPED_BITS = 20
_SMALLEST_NORMAL, _LEAST_STEP = 2.0**-6, 2.0**-9


def encode(setting: Compression, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 rows of shape (n, k) as uint8 of shape (n, bytes).

    Args:
        setting: how.
        rows: rows that are decoded apart from one another.
        key: JAX random key, for stochastic rounding.
    """
    if isinstance(setting, BFloat16):
        return _bytes_of(rows.astype(jnp.bfloat16))
    if isinstance(setting, Float16):
        return _bytes_of(jnp.clip(rows, -_LARGEST_FLOAT16, _LARGEST_FLOAT16).astype(jnp.float16))
    assert isinstance(setting, Int8 | Float8)
    blocks = _in_blocks(rows, setting.block_elements)
    largest = _LARGEST_INT8 if isinstance(setting, Int8) else _LARGEST_FLOAT8
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest
    scaled = jnp.where(scales == 0, 0.0, blocks / jnp.where(scales == 0, 1.0, scales))
    noise = jax.random.bits(key, scaled.shape) if setting.stochastic else None
    narrow = _int8(scaled, noise) if isinstance(setting, Int8) else _float8(scaled, noise)
    numbers = _bytes_of(narrow.reshape(rows.shape[0], -1))
    return jnp.concatenate([numbers, _bytes_of(scales.reshape(rows.shape[0], -1))], axis=1)


def decode(setting: Compression, payload: jax.Array, num_elements: int) -> jax.Array:
    """Returns the float32 rows of shape (n, num_elements) that were encoded."""
    if isinstance(setting, BFloat16 | Float16):
        dtype = jnp.bfloat16 if isinstance(setting, BFloat16) else jnp.float16
        return _from_bytes(payload, dtype).astype(jnp.float32)
    assert isinstance(setting, Int8 | Float8)
    width = min(setting.block_elements, num_elements)
    num_blocks = -(-num_elements // width)
    dtype = jnp.int8 if isinstance(setting, Int8) else jnp.float8_e4m3fn
    numbers = _from_bytes(payload[:, : num_blocks * width], dtype).astype(jnp.float32)
    scales = _from_bytes(payload[:, num_blocks * width :], jnp.float32)
    blocks = numbers.reshape(-1, num_blocks, width) * scales[:, :, None]
    return blocks.reshape(payload.shape[0], -1)[:, :num_elements]


def _in_blocks(rows: jax.Array, block_elements: int) -> jax.Array:
    width = min(block_elements, rows.shape[1])
    missing = -rows.shape[1] % width
    padded = jnp.pad(rows, ((0, 0), (0, missing))) if missing else rows
    return padded.reshape(rows.shape[0], -1, width)


def _int8(scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
    rounded = jnp.round(scaled) if noise is None else jnp.floor(scaled + _uniform(noise))
    return jnp.clip(rounded, -_LARGEST_INT8, _LARGEST_INT8).astype(jnp.int8)


def _float8(scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is not None:
        scaled = _rounded_by_chance(scaled, noise)
    return jnp.clip(scaled, -_LARGEST_FLOAT8, _LARGEST_FLOAT8).astype(jnp.float8_e4m3fn)


def _rounded_by_chance(scaled: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds to numbers of float8, up or down by chance."""
    bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
    mask = jnp.uint32((1 << _DROPPED_BITS) - 1)
    # A carry into the exponent is the next power of two, as it should be.
    normal = jax.lax.bitcast_convert_type((bits + (noise & mask)) & ~mask, jnp.float32)
    small = jnp.floor(scaled / _LEAST_STEP + _uniform(noise)) * _LEAST_STEP
    return jnp.where(jnp.abs(scaled) < _SMALLEST_NORMAL, small, normal)


def _uniform(noise: jax.Array) -> jax.Array:
    """Numbers of [0, 1) from random bits."""
    return (noise >> 8).astype(jnp.float32) * 2.0**-24


def _bytes_of(rows: jax.Array) -> jax.Array:
    """Returns rows of shape (n, k) as their bytes: XLA:CPU widens narrow floats in messages."""
    as_bytes = jax.lax.bitcast_convert_type(rows, jnp.uint8)
    return as_bytes.reshape(rows.shape[0], -1)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _from_bytes(payload: jax.Array, dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return jax.lax.bitcast_convert_type(payload, dtype)
    return jax.lax.bitcast_convert_type(payload.reshape(payload.shape[0], -1, size), dtype)
