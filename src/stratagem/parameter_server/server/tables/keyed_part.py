"""Rows of a keyed table in one update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.parameter_server.server.shards import UpdatedPart, padded_empty
from stratagem.parameter_server.server.tables.keyed_rows import Sighting

if TYPE_CHECKING:
    from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard


class KeyedPart(UpdatedPart):
    """Known rows and initial values of new ones, which one optimizer updates."""

    def __init__(
        self,
        shard: KeyedShard,
        optimizer: str,
        sighting: Sighting,
        grads: np.ndarray,
        version: int,
    ) -> None:
        self._table, self._sighting, self._version = shard, sighting, version
        if sighting.order is not None:
            grads = grads[sighting.order]
        super().__init__(shard, optimizer, sighting.slots, grads)
        self.num_refused = len(sighting.refused)

    def keep(self, value: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Stores the new rows in the shard."""
        count = len(self._sighting)
        stored = {self._names[name]: np.asarray(slot)[:count] for name, slot in slots.items()}
        self._table.keep(self._sighting, self._version, np.asarray(value)[:count], stored)

    def _taken(self, slot: str | None) -> Any:
        sighting, table = self._sighting, self._table
        rows = padded_empty(len(sighting), table.spec.shape[1:], table.dtype_of(slot))
        num_known = len(sighting.slots)
        if num_known:
            table.take(slot, sighting.slots, rows)
        if len(sighting.new):
            rows[num_known : len(sighting)] = table.initial_rows(slot, sighting)
        return rows
