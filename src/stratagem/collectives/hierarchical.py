"""Hierarchical all-reduce: within groups, between groups, and within groups again.

Only 1 / (group size) of the array is sent between groups, where links are slow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stratagem.collectives.axis import ReplicaAxis
from stratagem.collectives.ring import split_into_shards

__all__ = ["hierarchical_sum"]


def hierarchical_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Without groups it is a plain `psum`.

    Source: TF 2.21 cross_device_ops.py, HierarchicalCopyAllReduce.
    """
    if not axis.groups:
        return jax.lax.psum(array, axis.name)
    inside = [list(group) for group in axis.groups]
    between = [list(peers) for peers in zip(*axis.groups, strict=True)]
    pieces = split_into_shards(array, len(inside[0]))
    own = jax.lax.psum_scatter(pieces, axis.name, axis_index_groups=inside)
    own = jax.lax.psum(own, axis.name, axis_index_groups=between)
    whole = jax.lax.all_gather(own, axis.name, axis_index_groups=inside)
    return jnp.ravel(whole)[: array.size].reshape(array.shape)
