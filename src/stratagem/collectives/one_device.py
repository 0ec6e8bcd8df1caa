"""A sum over replicas as one device would make it: all arrays come to one place and are added.

In one program for all replicas each of them is that place: each gathers and adds alike, and nothing
has to be sent back. It takes one message a pair of replicas, and n times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives.axis import ReplicaAxis

__all__ = ["one_device_sum"]


def one_device_sum(
    array: jax.Array,
    axis: ReplicaAxis,
    accumulate: Callable[[Sequence[Any]], Any] | None = None,
) -> jax.Array:
    """Returns the sum of an array over replicas, on each of them. Call in a compiled step.

    Args:
        array: local array of this replica, of one shape and dtype on all.
        axis: the replicas.
        accumulate: given the arrays of all replicas in their order, returns what to take for their
            sum; None adds them one after the other.

    Returns:
        What `accumulate` returns; else an array of the same shape and dtype.

    Source: TF 2.21 cross_device_ops.py, ReductionToOneDevice.
    """
    gathered = jax.lax.all_gather(array, axis.name)
    parts = [gathered[replica] for replica in range(axis.size)]
    if accumulate is not None:
        return jnp.asarray(accumulate(parts))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
