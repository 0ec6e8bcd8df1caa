"""`Islands`: groups of replicas that train in lockstep."""

from __future__ import annotations

import dataclasses


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
