"""Collectives inside a compiled step, over a named mesh axis.

They run in `jax.shard_map` with `check_vma=False`, where the transpose of a sum over replicas is
again a sum over replicas: the gradient that `tf.distribute` defines for `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.options import ReduceOp

__all__ = ["all_gather", "all_reduce", "all_reduce_packed"]

# Measured on two CPU devices of one process: copying larger arrays costs more than the messages.
_MAX_PACKED_ELEMENTS = 16_384


def all_reduce(op: ReduceOp, value: Any, axis_name: str) -> jax.Array:
    """Combines a value over a mesh axis, on every replica.

    Args:
        op: SUM or MEAN.
        value: local array, of one shape on all replicas.
        axis_name: the mesh axis.

    Returns:
        Array of the same shape; the dtype is kept by SUM, and MEAN of integers is a float.

    Source: JAX, jax.lax.psum; TF 2.21 distribute_lib.py, ReplicaContext.all_reduce.
    """
    value = jnp.asarray(value)
    if op is ReduceOp.SUM:
        return jax.lax.psum(value.astype(jnp.int32) if value.dtype == bool else value, axis_name)
    return jax.lax.pmean(value, axis_name)


def all_reduce_packed(op: ReduceOp, values: Sequence[Any], axis_name: str) -> list[jax.Array]:
    """Combines many values over a mesh axis, the small ones of a dtype as one array.

    Args:
        op: SUM or MEAN.
        values: local arrays, each of one shape on all replicas.
        axis_name: the mesh axis.

    Returns:
        What `all_reduce` returns for each.
    """
    arrays = [jnp.asarray(value) for value in values]
    results = dict[int, jax.Array]()
    small: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        if array.size <= _MAX_PACKED_ELEMENTS:
            small.setdefault(array.dtype, []).append(index)
        else:
            results[index] = all_reduce(op, array, axis_name)
    for members in small.values():
        flat = [arrays[index].ravel() for index in members]
        joined = all_reduce(op, jnp.concatenate(flat), axis_name)
        parts = jnp.split(joined, np.cumsum([part.size for part in flat])[:-1])
        for index, part in zip(members, parts, strict=True):
            results[index] = part.reshape(arrays[index].shape)
    return [results[index] for index in range(len(arrays))]


def all_gather(value: Any, axis: int, axis_name: str, lengths: tuple[int, ...] | None) -> jax.Array:
    """Concatenates a value over a mesh axis, on every replica.

    Args:
        value: local array, of one shape on all replicas.
        axis: the array axis to concatenate along, not negative.
        axis_name: the mesh axis.
        lengths: true sizes along `axis`, one a replica, where the rest is padding; None for none.

    Returns:
        Array whose size along `axis` is the sum of the true sizes, in replica order.

    Source: JAX, jax.lax.all_gather; TF 2.21 distribute_lib.py, ReplicaContext.all_gather.
    """
    value = jnp.asarray(value)
    if lengths is None:
        return jax.lax.all_gather(value, axis_name, axis=axis, tiled=True)
    parts = jax.lax.all_gather(value, axis_name, axis=0, tiled=False)
    true_parts = [
        jax.lax.slice_in_dim(parts[index], 0, length, axis=axis)
        for index, length in enumerate(lengths)
    ]
    return jnp.concatenate(true_parts, axis=axis)
