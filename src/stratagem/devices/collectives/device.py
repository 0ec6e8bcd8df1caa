"""All-gather over a mesh axis inside a compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def all_gather(
    value: object,
    axis: int,
    axis_name: str | tuple[str, ...],
    lengths: tuple[int, ...] | None,
    groups: list[list[int]] | None = None,
) -> jax.Array:
    """Concatenates a local array along `axis` over a mesh axis, in replica order.

    `lengths` are the true sizes along `axis`, one per replica, if the arrays are padded. `groups`
    of replicas are concatenated apart from one another.

    Source: JAX, jax.lax.all_gather; TF 2.21 distribute_lib.py, ReplicaContext.all_gather.
    """
    value = jnp.asarray(value)
    if lengths is None:
        return jax.lax.all_gather(value, axis_name, axis=axis, tiled=True, axis_index_groups=groups)
    parts = jax.lax.all_gather(value, axis_name, axis=0, tiled=False, axis_index_groups=groups)
    true_parts = [
        jax.lax.slice_in_dim(parts[index], 0, length, axis=axis)
        for index, length in enumerate(lengths)
    ]
    return jnp.concatenate(true_parts, axis=axis)
