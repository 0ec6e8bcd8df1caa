"""Arrays joined from parts, of which each replica of an island has one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

JOINED = "_stratagem_joined_from_parts"


def joined(gather: Callable[[jax.Array], jax.Array], part: jax.Array) -> jax.Array:
    """Returns what a function gathers from the parts of an island's replicas.

    The parts of one place must be equal on all islands, so that the result is equal on all
    replicas: the replication analysis takes it for a sum over replicas.
    """
    return _stratagem_joined_from_parts(gather, part)


# Recognized by its name in the trace.
@functools.partial(jax.jit, static_argnums=0)
def _stratagem_joined_from_parts(
    gather: Callable[[jax.Array], jax.Array], part: jax.Array
) -> jax.Array:
    return gather(part)
