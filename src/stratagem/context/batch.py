"""How many true examples a replica holds in this step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

__all__ = ["ReplicaBatch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """The rows of a step's batch, as one replica sees them.

    The true sizes are known when a step is compiled: a step with other sizes is another program.

    Args:
        size: rows that this replica holds, padding included; None if the step has no batch.
        lengths: true rows of each replica in replica order; None if every row is true.
    """

    size: int | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def is_padded(self) -> bool:
        """Whether some replica holds rows that only pad."""
        return self.lengths is not None

    def num_examples(self, replica_id: Any) -> Any:
        """Returns the true rows of a replica.

        Args:
            replica_id: int, or traced scalar.

        Returns:
            An int where it is known, else a traced int32 scalar.
        """
        if self.lengths is None:
            return self.size
        if isinstance(replica_id, int):
            return self.lengths[replica_id]
        return jnp.asarray(self.lengths, jnp.int32)[replica_id]

    def global_num_examples(self, num_replicas: int) -> int | None:
        """Returns the true rows of all replicas together.

        Args:
            num_replicas: number of replicas.

        Returns:
            Their number; None if the step has no batch.
        """
        if self.lengths is not None:
            return sum(self.lengths)
        return None if self.size is None else self.size * num_replicas

    def mask(self, replica_id: Any) -> Any:
        """Returns which rows are true.

        Args:
            replica_id: int, or traced scalar.

        Returns:
            Boolean array of shape (size,); None if the step has no batch.
        """
        if self.size is None:
            return None
        return jnp.arange(self.size) < self.num_examples(replica_id)
