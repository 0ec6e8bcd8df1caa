"""Random seeds that differ between replicas and depend only on the initial seed.

`keras.random.SeedGenerator.next` is replaced (Keras 3.12 to 3.15): in a replica function it mixes
the replica id into the returned seed. Replica 0 draws the same numbers as a single device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import keras

from stratagem.context import get_replica_context
from stratagem.keras.variables.annotations import making_worker_local

__all__ = ["install"]

# 2**32 divided by the golden ratio: small multiples are far apart, so replicas never get the seeds
# of later steps.
_SEED_STRIDE = 0x9E3779B9


def install() -> None:
    """Makes seed generators differ by replica. Called once, on import."""
    original = keras.random.SeedGenerator.next

    def next_seed(self: Any, ordered: bool = True) -> Any:
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

    keras.random.SeedGenerator.next = next_seed
    original_init = keras.random.SeedGenerator.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with making_worker_local():
            original_init(self, *args, **kwargs)

    keras.random.SeedGenerator.__init__ = init
