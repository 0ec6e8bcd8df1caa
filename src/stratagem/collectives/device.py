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

from stratagem.collectives.packing import Packing
from stratagem.options import ReduceOp

__all__ = ["all_gather", "all_reduce", "all_reduce_packed"]


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


def all_reduce_packed(
    op: ReduceOp, values: Sequence[Any], axis_name: str, packing: Packing
) -> list[jax.Array]:
    """Combines many values over a mesh axis, several of a dtype as one array.

    Args:
        op: SUM or MEAN.
        values: local arrays, each of one shape on all replicas.
        axis_name: the mesh axis.
        packing: which of them are joined.

    Returns:
        What `all_reduce` returns for each.
    """
    arrays = [jnp.asarray(value) for value in values]
    packs = packing.packs([array.nbytes for array in arrays], [array.dtype for array in arrays])
    results = dict[int, jax.Array]()
    for pack in packs:
        if len(pack) == 1:
            results[pack[0]] = all_reduce(op, arrays[pack[0]], axis_name)
            continue
        flat = [arrays[index].ravel() for index in pack]
        joined = all_reduce(op, jnp.concatenate(flat), axis_name)
        parts = jnp.split(joined, np.cumsum([part.size for part in flat])[:-1])
        for index, part in zip(pack, parts, strict=True):
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
