"""Random seeds that differ between replicas and depend only on the initial seed.

In a replica function the replica id is mixed into each seed. Replica 0 draws the numbers of one
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.variables.requests import IS_SEED, annotated

if TYPE_CHECKING:
    import keras


# 2**32 divided by the golden ratio: small multiples are far apart, so replicas never get the seeds
# of later steps.
_SEED_STRIDE = 0x9E3779B9


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


def worker_local(original: Callable[..., Any]) -> Any:
    """Returns `SeedGenerator.__init__` whose state stays in each worker."""

    @functools.wraps(original)
    def init(self: keras.random.SeedGenerator, *args: object, **kwargs: object) -> None:
        with annotated(is_worker_local=True):
            original(self, *args, **kwargs)
        setattr(self.state, IS_SEED, True)  # if it joins a strategy later

    return init
