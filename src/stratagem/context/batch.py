"""`ReplicaBatch`: true and padded row counts of a step's batch on each replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

__all__ = ["ReplicaBatch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """Row counts of a step's batch, as one replica sees them.

    True sizes are static, so a step with other sizes is another program. `size` is this replica's
    number of rows including padding, or None without a batch. `lengths` are the true rows of each
    replica, or None without padding.
    """

    size: int | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def is_padded(self) -> bool:
        """True if any replica has padding."""
        return self.lengths is not None

    def num_examples(self, replica_id: object) -> Any:
        """Returns the true rows of a replica: an int if known, otherwise a traced int32 scalar."""
        if self.lengths is None:
            return self.size
        if isinstance(replica_id, int):
            return self.lengths[replica_id]
        return jnp.asarray(self.lengths, jnp.int32)[replica_id]

    def global_num_examples(self, num_replicas: int) -> int | None:
        """Returns the total true rows over all replicas, or None without a batch."""
        if self.lengths is not None:
            return sum(self.lengths)
        return None if self.size is None else self.size * num_replicas

    def mask(self, replica_id: object) -> Any:
        """Returns a boolean array of shape (size,), True for true rows; None without a batch."""
        if self.size is None:
            return None
        return jnp.arange(self.size) < self.num_examples(replica_id)
