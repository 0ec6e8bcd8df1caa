"""Rows of a keyed table as slots: admission of new keys, eviction, and counters."""

from __future__ import annotations

import dataclasses

import numpy as np

from stratagem.parameter_server.server.tables.key_slots import DirtyRows, KeySlots
from stratagem.parameter_server.server.tables.table_options import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    TableOptions,
    WithProbability,
    are_drawn,
)

COUNTERS: tuple[str, ...] = ("created", "evicted", "evicted_updates", "refused_updates")


@dataclasses.dataclass(frozen=True)
class Sighting:
    """Keys of one update.

    Args:
        slots: slots of known keys.
        new: keys whose rows the update makes.
        refused: keys without a row, whose gradients are dropped.
        order: places of the known and then the new keys in the update; None if all are known.
    """

    slots: np.ndarray
    new: np.ndarray
    refused: np.ndarray
    order: np.ndarray | None

    def __len__(self) -> int:
        return len(self.slots) + len(self.new)


class KeyedRows:
    """Slots of rows, and of `candidates`: keys that are counted until they get a row.

    `counters`, since the table was created: rows created and evicted, updates of evicted rows, and
    row updates without a row. Each row update is in the count of its row, or in one of the last
    two. `most_rows` is the largest number of rows. Callers serialize changes.
    """

    def __init__(
        self, options: TableOptions, most_rows: int, dirty: DirtyRows | None = None
    ) -> None:
        self._options = options
        self.most_rows = min(most_rows, options.max_rows or most_rows)
        self.rows = KeySlots(most_rows, dirty)
        self.candidates = KeySlots(self.most_candidates)
        self.counters = dict.fromkeys(COUNTERS, 0)
        # Versions of this server and of that which saved the rows differ by so much.
        self.version_offset = 0

    def sighting(self, keys: np.ndarray, version: int) -> Sighting:
        """Decides what an update does with its distinct keys, and changes nothing."""
        version += self.version_offset
        slots = self.rows.find(keys)
        is_known = slots >= 0
        none = np.empty(0, np.int64)
        if is_known.all():
            return Sighting(slots, none, none, None)
        known, unknown = np.flatnonzero(is_known), np.flatnonzero(~is_known)
        new = keys[unknown]
        is_admitted = self._admitted(new, version)
        is_admitted &= np.cumsum(is_admitted) <= self.room(len(known))
        order = np.concatenate([known, unknown[is_admitted]])
        return Sighting(slots[known], new[is_admitted], new[~is_admitted], order)

    def room(self, num_known: int) -> int:
        """Returns how many rows can be made by a change with so many known keys."""
        if isinstance(self._options.eviction, LeastFrequent | LeastRecent):
            return self.most_rows - num_known
        return self.most_rows - len(self.rows)

    def make(self, known: np.ndarray, new: np.ndarray, version: int) -> np.ndarray:
        """Makes rows, and returns their slots. Evicts others, but not `known` ones, if needed."""
        if not len(new):
            return new
        eviction = self._options.eviction
        excess = len(self.rows) + len(new) - self.most_rows
        if excess > 0 and isinstance(eviction, LeastFrequent | LeastRecent):
            with self.rows.held(known):
                evicted = self.rows.chosen(eviction, excess)
            self._evict(evicted, version)
        self.counters["created"] += len(new)
        return self.rows.add(new)

    def keep(self, sighting: Sighting, version: int) -> np.ndarray:
        """Records an update: makes its new rows, and returns the slots of all its rows."""
        version += self.version_offset
        self.rows.note(sighting.slots, version)
        slots = sighting.slots
        if len(sighting.new):
            made = self.make(sighting.slots, sighting.new, version)
            self.rows.note(made, version)
            slots = np.concatenate([slots, made])
        self.counters["refused_updates"] += len(sighting.refused)
        if self.most_candidates:
            self._count_candidates(sighting, version)
        return slots

    def evict_aged(self, version: int) -> None:
        """Evicts rows for their age."""
        if isinstance(self._options.eviction, NotSeenFor):
            version += self.version_offset
            self._evict(self.rows.aged(self._options.eviction, version), version)

    @property
    def most_candidates(self) -> int:
        """Largest number of keys that are counted without a row."""
        admission = self._options.admission
        if isinstance(admission, AfterSightings) and admission.sightings > 1:
            return admission.max_candidates
        return 0

    def _admitted(self, keys: np.ndarray, version: int) -> np.ndarray:
        admission = self._options.admission
        if isinstance(admission, WithProbability):
            return are_drawn(admission, keys, version)
        if admission is None or not self.most_candidates:
            return np.ones(len(keys), np.bool_)
        slots = self.candidates.find(keys)
        counts = np.ones(len(keys), np.int64)
        counts[slots >= 0] += self.candidates.counts[slots[slots >= 0]]
        return counts >= admission.sightings

    def _count_candidates(self, sighting: Sighting, version: int) -> None:
        """Counts keys without a row, and forgets those that have got one."""
        candidates, most = self.candidates, self.most_candidates
        slots = candidates.find(sighting.new)
        candidates.remove(slots[slots >= 0], version)
        slots = candidates.find(sighting.refused)
        known = slots[slots >= 0]
        candidates.note(known, version)
        new = sighting.refused[slots < 0][: most - len(known)]
        excess = len(candidates) + len(new) - most
        if excess > 0:
            with candidates.held(known):
                forgotten = candidates.chosen(LeastRecent(), excess)
            candidates.remove(forgotten, version)
        candidates.note(candidates.add(new), version)

    def _evict(self, slots: np.ndarray, version: int) -> None:
        self.counters["evicted"] += len(slots)
        self.counters["evicted_updates"] += int(self.rows.counts[slots].sum(dtype=np.int64))
        self.rows.remove(slots, version)
