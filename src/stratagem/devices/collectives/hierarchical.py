"""Hierarchical all-reduce: within groups, between groups, and within groups again.

Only 1 / (group size) of the array is sent between groups, where links are slow.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.ring import split_into_shards


def hierarchical_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Without groups it is a plain `psum`.

    Source: TF 2.21 cross_device_ops.py, HierarchicalCopyAllReduce.
    """
    if not axis.groups:
        return jax.lax.psum(array, axis.name)

    def between(part: jax.Array, peers: list[list[int]]) -> jax.Array:
        return jax.lax.psum(part, axis.name, axis_index_groups=peers)

    return sum_by_groups(array, axis, between)


def sum_by_groups(
    array: jax.Array,
    axis: ReplicaAxis,
    between: Callable[[jax.Array, list[list[int]]], jax.Array],
) -> jax.Array:
    """Returns the sum of a local array over the replicas of an axis with groups.

    `between` receives a replica's part of its group's sum, and lists of the replicas of each place
    in the groups. It returns the sum over the replicas of a list.
    """
    inside = [list(group) for group in axis.groups]
    peers = [list(one) for one in zip(*axis.groups, strict=True)]
    pieces = split_into_shards(array, len(inside[0]))
    own = jax.lax.psum_scatter(pieces, axis.name, axis_index_groups=inside)
    own = between(own, peers)
    whole = jax.lax.all_gather(own, axis.name, axis_index_groups=inside)
    return jnp.ravel(whole)[: array.size].reshape(array.shape)
