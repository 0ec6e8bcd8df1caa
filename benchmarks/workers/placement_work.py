"""What workers train that show where variables are kept, and what they are asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

__all__ = ["PINNED", "PlacementOptions", "training_data"]

# A memory of the host, as JAX names it.
PINNED = "pinned_host"

NUM_FIELDS = 8
_POWER = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """A model with a large table, and where it is trained.

    Args:
        placement: "mirrored", "state in parts", "hybrid, sharded", "hybrid, central", "central" or
            "hybrid, pinned".
        optimizer: "adagrad" or "adam".
        num_rows: of the table.
        row_size: numbers in a row.
        batch_size: examples of all replicas together, of 8 ids each.
        steps_per_epoch: batches.
        devices: of the replicas.
        parameter_device: of what is central.
        dump: folder where XLA writes the programs; empty where nobody asks for what they exchange.
    """

    placement: str
    optimizer: str
    num_rows: int
    row_size: int = 64
    batch_size: int = 1024
    steps_per_epoch: int = 10
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    parameter_device: str = "cpu:2"
    dump: str = ""

    @property
    def table_bytes(self) -> int:
        return 4 * self.num_rows * self.row_size


def training_data(options: PlacementOptions) -> tuple[Any, Any]:
    """Returns the ids and targets of an epoch; row r is asked for in proportion to r**(-3/4).

    Args:
        options: of the model.
    """
    rng = np.random.default_rng(0)
    num_examples = options.batch_size * options.steps_per_epoch
    shares = rng.random((num_examples, NUM_FIELDS)) ** _POWER
    ids = (options.num_rows * shares).astype("int32")
    return ids, rng.normal(size=(num_examples, 1)).astype("float32")
