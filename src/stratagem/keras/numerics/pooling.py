"""Max pooling with a fast gradient on CPU.

XLA:CPU computes the gradient of a maximum over windows by select-and-scatter, one element at a
time: half the time of a small convolutional network. For non-overlapping windows, a comparison and
a copy give the same gradient, bit for bit. It serves replica functions on CPU devices; everything
else goes to Keras.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.patches import patches


@patches(keras.layers.MaxPooling1D, "call", why="XLA's gradient of max pooling is slow on CPU")
@patches(keras.layers.MaxPooling2D, "call", why="the same")
@patches(keras.layers.MaxPooling3D, "call", why="the same")
def fast_on_cpu(original: Callable[..., Any]) -> Any:
    """Returns `call` of a max-pooling layer with a fast gradient on CPU."""

    @functools.wraps(original)
    def call(self: keras.layers.Layer, inputs: object) -> Any:
        if isinstance(inputs, jax.Array) and _runs_on_cpu() and _fits(self, inputs):
            return max_of_windows(inputs, tuple(self.pool_size))
        return original(self, inputs)

    return call


def _runs_on_cpu() -> bool:
    context = get_replica_context()
    topology = None if context is None else context.strategy.topology
    # The default strategy has no devices and must leave Keras unchanged.
    return topology is not None and topology.devices is not None and topology.platform == "cpu"


def _fits(layer: keras.layers.Layer, inputs: jax.Array) -> bool:
    """Returns True if windows do not overlap and partial windows are dropped."""
    window, shape = tuple(layer.pool_size), inputs.shape[1:-1]
    is_whole = all(size % extent == 0 for size, extent in zip(shape, window, strict=True))
    return (
        jnp.issubdtype(inputs.dtype, jnp.floating)
        and tuple(layer.strides) == window
        and layer.data_format == "channels_last"
        and (is_whole or layer.padding == "valid")
        and all(size >= extent for size, extent in zip(shape, window, strict=True))
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def max_of_windows(inputs: jax.Array, window: Sequence[int]) -> Any:
    """Returns the maximum of each non-overlapping window. Call anywhere.

    `inputs` is a floating array of shape (batch, *spatial, channels); the result has shape
    (batch, *(size // window), channels), so partial windows are dropped. The derivative goes to the
    first maximum of a window, as with `jax.lax.reduce_window`.

    Example:
        >>> max_of_windows(jax.numpy.array([[[1.0], [5.0], [2.0], [3.0]]]), (2,)).ravel()
        Array([5., 3.], dtype=float32)
    """
    extents = (1, *window, 1)
    lowest = jnp.asarray(-jnp.inf, inputs.dtype)
    return jax.lax.reduce_window(inputs, lowest, jax.lax.max, extents, extents, "VALID")


@max_of_windows.defjvp
def _max_of_windows_jvp(
    window: Sequence[int], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[Any, Any]:
    (inputs,), (tangent,) = primals, tangents
    outputs = max_of_windows(inputs, window)
    place = _place_of_first(inputs, outputs, window)
    whole = tuple(size * extent for size, extent in zip(outputs.shape[1:-1], window, strict=True))
    split: list[int] = [inputs.shape[0]]
    for size, extent in zip(outputs.shape[1:-1], window, strict=True):
        split += [size, extent]
    split.append(inputs.shape[-1])
    within = tuple(range(2, 2 * len(window) + 1, 2))  # axes of positions in a window
    places = jnp.arange(math.prod(window), dtype=place.dtype).reshape(window)
    is_first = jnp.expand_dims(place, within) == jnp.expand_dims(
        places, (0, *range(1, 2 * len(window), 2), 2 * len(window) + 1)
    )
    tangent = jax.lax.slice(
        tangent, (0,) * inputs.ndim, (inputs.shape[0], *whole, inputs.shape[-1])
    )
    chosen = jnp.where(is_first, tangent.reshape(split), jnp.zeros((), tangent.dtype))
    return outputs, jnp.sum(chosen, axis=within)


def _place_of_first(inputs: jax.Array, outputs: jax.Array, window: Sequence[int]) -> Any:
    """Returns the row-major index of the first maximum in each window."""
    count = math.prod(window)
    dtype = jnp.int8 if count <= 127 else jnp.int32
    place = jnp.full(outputs.shape, count - 1, dtype)
    # Backwards, so that the first position of the maximum is written last.
    for index in reversed(range(count - 1)):
        offsets = _offsets(index, window)
        starts = (0, *offsets, 0)
        limits = (
            inputs.shape[0],
            *(
                offset + (size - 1) * extent + 1
                for offset, size, extent in zip(offsets, outputs.shape[1:-1], window, strict=True)
            ),
            inputs.shape[-1],
        )
        here = jax.lax.slice(inputs, starts, limits, (1, *window, 1))
        place = jnp.where(here == outputs, jnp.asarray(index, dtype), place)
    return place


def _offsets(index: int, window: Sequence[int]) -> tuple[int, ...]:
    offsets: list[int] = []
    for extent in reversed(window):
        index, offset = divmod(index, extent)
        offsets.append(offset)
    return tuple(reversed(offsets))
