"""`Islands`: groups of replicas that train in lockstep, and sums between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives.communicator import Communicator
from stratagem.collectives.joined import joined
from stratagem.collectives.ring import split_into_shards

__all__ = ["IslandSums", "Islands"]


@dataclasses.dataclass(frozen=True)
class Islands:
    """Groups of consecutive replicas. Between them links are slow.

    Args:
        num_replicas: number of replicas.
        size: replicas of an island, a divisor of their number.
    """

    num_replicas: int
    size: int

    @property
    def count(self) -> int:
        """Number of islands."""
        return self.num_replicas // self.size

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Replicas of each island."""
        return tuple(
            tuple(range(first, first + self.size))
            for first in range(0, self.num_replicas, self.size)
        )

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Replicas of the same place in their islands, for each place."""
        return tuple(zip(*self.members, strict=True))


class IslandSums:
    """Sums of one array per island, as seen from one replica of it.

    All replicas of an island have the same array. Each sends a part of it to the replicas of its
    place in the other islands, so that an island sends it once.

    Args:
        islands: the islands.
        communicator: that of all replicas.
        replica_id: ID of this replica among all.
    """

    def __init__(self, islands: Islands, communicator: Communicator, replica_id: Any) -> None:
        self.size = islands.size
        self._inside = communicator.among(islands.members)
        self.between = communicator.among(islands.peers, packs=True)
        self.island_id = replica_id // islands.size
        self._place = replica_id % islands.size

    def by_parts(
        self, add: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Returns sums between islands, equal on all replicas.

        Args:
            add: returns the sums of arrays over the replicas of `between`.
            arrays: the island's, equal on its replicas.
        """
        if self.size == 1:
            return list(add(arrays))
        sums = add([self.part(array) for array in arrays])
        return [self.equal(total, like) for total, like in zip(sums, arrays, strict=True)]

    def part(self, array: jax.Array) -> jax.Array:
        """Returns this replica's part of an array, flat and padded with zeros."""
        return split_into_shards(array, self.size)[self._place]

    def whole(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island."""
        if not like.size:
            return like
        flat = self._gather(part)
        return flat[: like.size].reshape(like.shape)

    def equal(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island; parts of a place are equal on all."""
        if not like.size:
            return like
        return joined(self._gather, part)[: like.size].reshape(like.shape)

    def _gather(self, part: jax.Array) -> Any:
        return self._inside.all_gather(part, 0, None)

    def sent_equal(self, array: jax.Array) -> jax.Array:
        """Returns an array that the replicas of a place have in common, equal on all replicas."""
        return array if self.size == 1 else self.equal(self.part(array), jnp.asarray(array))
