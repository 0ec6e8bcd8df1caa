"""Concatenation over replicas inside a compiled step, over a named mesh axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["all_gather"]


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
