"""All-reduce to one device: gathers all arrays in one place and adds them.

In an SPMD program every replica is that place: all gather and add alike, so nothing is sent back.
It takes one message per pair of replicas, and n times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.axis import ReplicaAxis


def one_device_sum(
    array: jax.Array,
    axis: ReplicaAxis,
    accumulate: Callable[[Sequence[Any]], Any] | None = None,
) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    `accumulate` replaces the sum by a function of the arrays of all replicas, in replica order.

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
