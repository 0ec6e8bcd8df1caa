"""Random seeds that differ between replicas and depend only on the initial seed.

In a replica function the replica id is mixed into each seed. Replica 0 draws the numbers of one
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.patches import patches
from stratagem.keras.variables.annotations import IS_SEED, making_worker_local

# 2**32 divided by the golden ratio: small multiples are far apart, so replicas never get the seeds
# of later steps.
_SEED_STRIDE = 0x9E3779B9


@patches(
    keras.random.SeedGenerator,
    "next",
    why="replicas draw different numbers, which follow from one seed",
)
def replica_seed(original: Callable[..., Any]) -> Any:
    """Returns `SeedGenerator.next` whose seeds differ by replica."""

    def next_seed(self: keras.random.SeedGenerator, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        context = get_replica_context()
        if context is None:
            return seed
        first = context.strategy.topology.first_replica_id
        if context.num_replicas_in_sync == 1 and not first:
            return seed
        replica_id = jnp.asarray(context.replica_id_in_sync_group, jnp.uint32) + jnp.uint32(first)
        offset = (replica_id * jnp.uint32(_SEED_STRIDE)).astype(seed.dtype)
        return seed.at[0].add(offset)

    return next_seed


@patches(
    keras.random.SeedGenerator,
    "__init__",
    why="the seed of a worker is not stored on parameter servers",
)
def worker_local(original: Callable[..., Any]) -> Any:
    """Returns `SeedGenerator.__init__` whose state stays in each worker."""

    @functools.wraps(original)
    def init(self: keras.random.SeedGenerator, *args: object, **kwargs: object) -> None:
        with making_worker_local():
            original(self, *args, **kwargs)
        setattr(self.state, IS_SEED, True)  # if it joins a strategy later

    return init
