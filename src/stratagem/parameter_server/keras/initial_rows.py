"""Rows of a large variable's initial value, made without the rest of it.

JAX's generator makes each random number from the key and its place alone. A generator of our own,
which JAX and Keras use like any other, begins at the place of the first row that is wanted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend import random as jax_random

from stratagem.errors import explain
from stratagem.keras.private import compute_fans

_BITS = 2**32


class _Random(Protocol):
    """An initializer of Keras that draws random numbers."""

    @property
    def seed(self) -> Any:
        """Its seed: a number or a generator."""
        ...


class InitialRows:
    """Makes rows of what an initializer makes of a whole variable.

    Args:
        initializer: of Keras; its random numbers are drawn from JAX's default generator.
        shape: of the whole variable.
        dtype: its dtype.

    Raises:
        NotImplementedError: an initializer that needs the whole variable at once.

    Example:
        >>> from stratagem.parameter_server.keras.initial_rows import InitialRows
        >>> rows = InitialRows(keras.initializers.RandomUniform(seed=1), (10**9, 4), "float32")
        >>> rows(500_000_000, 2).shape
        (2, 4)
    """

    def __init__(self, initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype
        self._draw, self._seed = _drawn(initializer, self._shape)

    def __call__(self, first_row: int, num_rows: int) -> np.ndarray:
        """Returns rows.

        Args:
            first_row: the first.
            num_rows: how many.

        Returns:
            Array of shape (num_rows, ...).
        """
        shape = (num_rows, *self._shape[1:])
        if self._seed is None:
            return np.asarray(self._draw(shape, dtype=self._dtype))
        first = first_row * math.prod(self._shape[1:])
        place = [first // _BITS, first % _BITS]
        data = jnp.asarray([*self._seed, *place], "uint32")
        key = jax.random.wrap_key_data(data, impl=_rows_generator())
        return np.asarray(self._draw(shape, dtype=self._dtype, seed=key))


def _drawn(
    initializer: Callable[..., Any], shape: tuple[int, ...]
) -> tuple[Any, tuple[int, int] | None]:
    """Returns the function that draws any rows of an initializer, and its key."""
    initializers = keras.initializers
    kind, own = type(initializer), cast("Any", initializer)  # what it has depends on its class
    if kind in (initializers.Zeros, initializers.Ones) or (
        kind is initializers.Constant and np.ndim(own.value) == 0
    ):
        return initializer, None
    if kind is initializers.RandomUniform:
        limits = {"minval": own.minval, "maxval": own.maxval}
        return functools.partial(keras.random.uniform, **limits), _key(own)
    if kind in (initializers.RandomNormal, initializers.TruncatedNormal):
        moments = {"mean": own.mean, "stddev": own.stddev}
        is_cut = kind is initializers.TruncatedNormal
        draw = keras.random.truncated_normal if is_cut else keras.random.normal
        return functools.partial(draw, **moments), _key(own)
    if isinstance(initializer, initializers.VarianceScaling):
        return _scaled(initializer, shape), _key(initializer)
    raise NotImplementedError(
        explain(
            f"{kind.__name__} makes the initial value of a variable of shape {shape}, which is "
            "made in parts.",
            expected="zeros, ones, a constant, or random uniform or normal numbers, scaled or not.",
            fix="use such an initializer, or leave the variable in one piece: variable_partitioner "
            "says which are split.",
        )
    )


def _scaled(initializer: keras.initializers.VarianceScaling, shape: tuple[int, ...]) -> Any:
    """As `VarianceScaling.__call__` of Keras, with the fans of the whole variable."""
    fan_in, fan_out = compute_fans(shape, initializer)
    fan = {"fan_in": fan_in, "fan_out": fan_out}.get(initializer.mode, (fan_in + fan_out) / 2.0)
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return functools.partial(keras.random.uniform, minval=-limit, maxval=limit)
    if initializer.distribution == "untruncated_normal":
        return functools.partial(keras.random.normal, mean=0.0, stddev=math.sqrt(variance))
    # The standard deviation of normal numbers that are cut at two of theirs.
    stddev = math.sqrt(variance) / 0.87962566103423978
    return functools.partial(keras.random.truncated_normal, mean=0.0, stddev=stddev)


def _key(initializer: _Random) -> tuple[int, int]:
    """The key that Keras would draw from: of a number, or the next one of a generator."""
    seed = initializer.seed
    if isinstance(seed, keras.random.SeedGenerator):
        first, second = np.asarray(seed.next()).tolist()
        return first, second
    return int(seed) % _BITS, 0


@functools.cache
def _rows_generator() -> Any:
    """JAX's default generator, with the place of the first number in its key."""
    return jax_random.define_prng_impl(
        key_shape=(4,),
        seed=_unused,
        split=_unused,
        fold_in=_unused,
        random_bits=_bits_of_places,
        name="stratagem_rows",
        tag="rows",
    )


def _bits_of_places(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """The bits that JAX's generator makes of the places from the first one on."""
    key, high, low = data[:2], data[2], data[3]
    size = math.prod(shape)
    lows = low + jax.lax.iota("uint32", size)
    highs = high + (lows < low).astype("uint32")
    made = jax_random.threefry_2x32(key, jnp.concatenate([highs, lows]))
    first, second = made[:size], made[size:]
    if bit_width == 64:
        dtype = jnp.dtype("uint64")
        bits = (first.astype(dtype) << 32) | second.astype(dtype)
    else:
        bits = (first ^ second).astype(f"uint{bit_width}")
    return bits.reshape(shape)


def _unused(*_: object) -> Any:
    raise NotImplementedError(
        explain(
            "A random initial value that is made in parts was to be drawn from a derived key.",
            expected="numbers that are drawn from one key, each by its place.",
            fix="tell us the versions of Keras and JAX: those that were tested do not do so.",
        )
    )
