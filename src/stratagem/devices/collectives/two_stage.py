"""Two-stage all-reduce: each replica adds one shard of the array, and sends the sum to all others.

Every replica sends 2 (n - 1) / n of the array, the least possible, and waits for two messages
however many replicas there are; a ring waits for 2 (n - 1), one after the other. So it is for links
of a high latency. Groups of nearby replicas add among themselves first, and 1 / (group size) of the
array is sent between them.

Source: Rabenseifner, Optimization of collective reduction operations, 2004, for the two stages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.hierarchical import sum_by_groups
from stratagem.devices.collectives.ring import split_into_shards


def two_stage_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Shards are added in replica order, so without groups the bits are those of `one_device_sum`.
    """
    if not axis.groups:
        return _exchanged_sum(array, axis.name, axis.size, None)

    def between(part: jax.Array, peers: list[list[int]]) -> jax.Array:
        return _exchanged_sum(part, axis.name, len(peers[0]), peers)

    # JAX cannot batch an exchange in groups. Sums are by element: a batch is one more array.
    @jax.custom_batching.custom_vmap
    def add(whole: jax.Array) -> jax.Array:
        return sum_by_groups(whole, axis, between)

    @add.def_vmap
    def add_batch(_: int, is_batched: list[bool], whole: jax.Array) -> tuple[jax.Array, bool]:
        return add(whole), is_batched[0]

    @jax.custom_vjp
    def differentiable(whole: jax.Array) -> jax.Array:
        return add(whole)

    differentiable.defvjp(lambda whole: (add(whole), None), lambda _, grads: (add(grads),))
    return differentiable(array)


def _exchanged_sum(
    array: jax.Array, name: str | tuple[str, ...], count: int, groups: list[list[int]] | None
) -> jax.Array:
    shards = split_into_shards(array, count)
    received = _exchange(shards, name, groups)
    own = received[0]
    for shard in received[1:]:
        own = own + shard
    # An all-gather would do, but Gloo sends it around a ring. The gradient is the same exchange.
    whole = _exchange(jnp.broadcast_to(own, shards.shape), name, groups)
    return whole.ravel()[: array.size].reshape(array.shape)


def _exchange(
    rows: jax.Array, name: str | tuple[str, ...], groups: list[list[int]] | None
) -> jax.Array:
    return jax.lax.all_to_all(rows, name, split_axis=0, concat_axis=0, axis_index_groups=groups)
