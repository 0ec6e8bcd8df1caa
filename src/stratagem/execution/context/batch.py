"""`ReplicaBatch`: true and padded row counts of a step's batch on each replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from stratagem.devices.collectives.islands import Islands


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """Row counts of a step's batch, as one replica sees them.

    True sizes are static, so a step with other sizes is another program. `size` is this replica's
    number of rows including padding, or None without a batch. `lengths` are the true rows of each
    replica, or None without padding.

    In a compiled step the batch of an island may depend on the island: `choices` are then the
    lengths that it may have, and `choice` the traced index of those it has.
    """

    size: int | None = None
    lengths: tuple[int, ...] | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    choice: Any = None

    @property
    def is_padded(self) -> bool:
        """True if any replica has padding."""
        return self.lengths is not None or bool(self.choices)

    @property
    def fraction(self) -> float | None:
        """This replica's fraction of all rows, where a step is only analyzed; else None."""
        return None

    @property
    def has_examples(self) -> bool:
        """True if any replica has a row."""
        return bool(self.choices or self.size) if self.lengths is None else any(self.lengths)

    def num_examples(self, replica_id: object) -> Any:
        """Returns the true rows of a replica: an int if known, otherwise a traced int32 scalar."""
        if self.choices:
            return jnp.asarray(self.choices, jnp.int32)[self.choice, replica_id]
        if self.lengths is None:
            return self.size
        if isinstance(replica_id, int):
            return self.lengths[replica_id]
        return jnp.asarray(self.lengths, jnp.int32)[replica_id]

    def global_num_examples(self, num_replicas: int) -> Any:
        """Returns the total true rows over all replicas, or None without a batch.

        A traced int32 scalar where the batch has choices.
        """
        if self.choices:
            return jnp.asarray([sum(lengths) for lengths in self.choices], jnp.int32)[self.choice]
        if self.lengths is not None:
            return sum(self.lengths)
        return None if self.size is None else self.size * num_replicas

    def mask(self, replica_id: object) -> Any:
        """Returns a boolean array of shape (size,), True for true rows; None without a batch."""
        if self.size is None:
            return None
        return jnp.arange(self.size) < self.num_examples(replica_id)

    def alternatives(self) -> list[ReplicaBatch]:
        """Returns the batches that this one may be, in the order of `choice`; itself if known."""
        if not self.choices:
            return [self]
        return [ReplicaBatch(size=self.size, lengths=lengths) for lengths in self.choices]

    def of_island(self, islands: Islands, island_id: Any) -> ReplicaBatch:
        """Returns the batch of one island, whose replicas are counted from 0."""
        if self.lengths is None:
            return self
        parts = [tuple(self.lengths[one] for one in members) for members in islands.members]
        if isinstance(island_id, int):
            return ReplicaBatch(size=self.size, lengths=parts[island_id])
        choices = tuple(dict.fromkeys(parts))
        if len(choices) == 1:
            return ReplicaBatch(size=self.size, lengths=choices[0])
        places = jnp.asarray([choices.index(part) for part in parts], jnp.int32)
        return ReplicaBatch(size=self.size, choices=choices, choice=places[island_id])
