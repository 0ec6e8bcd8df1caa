"""Exchange of rows between the shards of a table and the replicas that look them up."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology

# Smaller exchanges are one message.
_MIN_BLOCK_BYTES = 2**26


@functools.partial(jax.jit, static_argnums=0)
def exchanged_rows(topology: Topology, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table sharded by rows: each device sends the rows it stores.

    `ids` have the replicas on axis 0. A device needs temporary memory for its own rows, and once
    more for as many, or for its shard if that is larger.
    """
    num_rows = table.shape[0]

    def exchange(shard: jax.Array, ids: jax.Array) -> jax.Array:
        ids = jnp.where(ids < 0, ids + num_rows, ids)
        rows = _rows_in_blocks(shard, ids.reshape(-1), topology)
        rows = rows.reshape(*ids.shape, *table.shape[1:])
        is_row = _over((ids >= 0) & (ids < num_rows), rows)
        fill_value = jnp.take(rows.reshape(-1)[:1], jnp.array([1]))[0]  # Fill value of jnp.take.
        return jnp.where(is_row, rows, fill_value)

    by_rows, stacked = PartitionSpec(topology.shard_axis), PartitionSpec(topology.replica_axis)
    return jax.shard_map(
        exchange,
        mesh=topology.mesh,
        in_specs=(by_rows, stacked),
        out_specs=stacked,
        check_vma=False,
    )(table, ids)


def _rows_in_blocks(shard: jax.Array, ids: jax.Array, topology: Topology) -> jax.Array:
    """Returns this device's rows, in as many messages as keep the rows of all devices small."""
    count = len(ids)
    min_rows = _MIN_BLOCK_BYTES // max(1, math.prod(shard.shape[1:]) * shard.dtype.itemsize)
    size = max(1, max(count, len(shard), min_rows) // topology.num_shards)
    if size >= count:
        return _rows(shard, ids, topology.shard_axis)

    def with_block(block: jax.Array, rows: jax.Array) -> jax.Array:
        first = jnp.minimum(block * size, count - size)  # the last block overlaps the one before
        own_ids = jax.lax.dynamic_slice_in_dim(ids, first, size)
        return jax.lax.dynamic_update_slice_in_dim(
            rows, _rows(shard, own_ids, topology.shard_axis), first, 0
        )

    rows = jnp.zeros((count, *shard.shape[1:]), shard.dtype)
    return jax.lax.fori_loop(0, -(-count // size), with_block, rows)


def _rows(shard: jax.Array, ids: jax.Array, axis: str) -> jax.Array:
    """Returns this device's rows; a row outside the table is zero."""
    local_ids = jax.lax.all_gather(ids, axis)
    local_ids -= (jax.lax.axis_index(axis) * len(shard)).astype(ids.dtype)
    is_here = (local_ids >= 0) & (local_ids < len(shard))
    rows = jnp.take(shard, local_ids, axis=0, mode="clip")
    rows = jnp.where(_over(is_here, rows), rows, jnp.zeros((), rows.dtype))
    return jax.lax.psum_scatter(rows, axis)


def _over(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns row flags in a shape that broadcasts over the rows' elements."""
    return flags.reshape(*flags.shape, *[1] * (rows.ndim - flags.ndim))
