"""A sum over replicas whose messages are bfloat16, half as long as those of float32.

Each replica adds one piece of the array in float32, so that a value is rounded twice whatever the
number of replicas is: on its way to the sum, and the sum on its way back. A rounding to the eight
significant bits of bfloat16 changes a number by at most 2**-8 of it; of a sum of values x the error
is thus at most 2**-8 (sum |x| + |sum x|), a little less than one percent of sum |x|.

Source: Rabenseifner, Optimization of collective reduction operations, 2004, for the two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives.axis import ReplicaAxis
from stratagem.collectives.ring import pieces_of

__all__ = ["bfloat16_sum", "rounded_sum"]


def bfloat16_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of an array over replicas, on each of them. Call in a compiled step.

    Args:
        array: local float32 array of this replica, of one shape on all.
        axis: the replicas.

    Returns:
        Array of the same shape and dtype, the same bits on all replicas.
    """
    return _differentiable_sum(array, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _differentiable_sum(array: jax.Array, axis: ReplicaAxis) -> Any:
    pieces = _pack(pieces_of(array, axis.size))
    received = jax.lax.all_to_all(pieces, axis.name, split_axis=0, concat_axis=0)
    own = jnp.sum(_unpack(received), axis=0)
    whole = _unpack(jax.lax.all_gather(_pack(own), axis.name))
    return whole.ravel()[: array.size].reshape(array.shape)


def _forward(array: jax.Array, axis: ReplicaAxis) -> tuple[Any, None]:
    return _differentiable_sum(array, axis), None


def _backward(axis: ReplicaAxis, _: None, incoming: jax.Array) -> tuple[jax.Array]:
    return (bfloat16_sum(incoming, axis),)


# What is cast to an integer has no derivative of its own; the sum's is the sum of what comes in.
_differentiable_sum.defvjp(_forward, _backward)


def rounded_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the same sum of one array a replica, outside a compiled step.

    Args:
        parts: float32 arrays of one shape, in replica order.
    """
    return _unpack(_pack(jnp.sum(_unpack(_pack(jnp.stack(parts))), axis=0)))


# XLA:CPU turns messages of bfloat16 into messages of float32; those of integers it leaves alone.
def _pack(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)


def _unpack(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.bfloat16).astype(jnp.float32)
