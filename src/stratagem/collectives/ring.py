"""A sum over replicas as a ring: each sends to its neighbour only, and each piece goes round twice.

Every replica sends 2 (n - 1) / n of the array, which is the least that is possible, in 2 (n - 1)
messages one after the other.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
2009.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stratagem.collectives.axis import ReplicaAxis

__all__ = ["ring_sum"]


def ring_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of an array over replicas, on each of them. Call in a compiled step.

    Args:
        array: local array of this replica, of one shape and dtype on all.
        axis: the replicas.

    Returns:
        Array of the same shape and dtype.
    """
    count = axis.size
    pieces = pieces_of(array, count)
    own = jax.lax.axis_index(axis.name)
    onward = [(replica, (replica + 1) % count) for replica in range(count)]

    def piece(number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pieces, number % count, keepdims=False)

    # A piece starts at the replica of its number and collects what is added on its way round.
    passing = piece(own)
    for hop in range(1, count):
        passing = jax.lax.ppermute(passing, axis.name, onward) + piece(own - hop)
    # Piece own + 1 is whole here; it goes round once more so that all have it.
    whole = jnp.zeros_like(pieces)
    whole = jax.lax.dynamic_update_index_in_dim(whole, passing, (own + 1) % count, 0)
    for hop in range(1, count):
        passing = jax.lax.ppermute(passing, axis.name, onward)
        whole = jax.lax.dynamic_update_index_in_dim(whole, passing, (own + 1 - hop) % count, 0)
    return whole.ravel()[: array.size].reshape(array.shape)


def pieces_of(array: jax.Array, count: int) -> jax.Array:
    """Returns an array as pieces of one size, with zeros at the end where it does not divide.

    Args:
        array: of any shape.
        count: of the pieces.

    Returns:
        Array of shape (count, elements of a piece).
    """
    flat = array.ravel()
    missing = -flat.size % count
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(count, -1)
