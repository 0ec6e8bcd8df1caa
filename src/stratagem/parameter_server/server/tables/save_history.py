"""Changes of a keyed table since each of its last saves."""

from __future__ import annotations

import dataclasses

import numpy as np

from stratagem.parameter_server.server.tables.key_slots import KeySlots

# Saves of several folders take turns, and each continues from its own last one.
_MOST_SAVES = 8
# They remember the changes of so many slots, or of as many as the table has.
_LEAST_SLOTS = 2**20
# Lists of changed slots are merged beyond this number.
_MOST_LISTS = 16


@dataclasses.dataclass(frozen=True)
class ChangedSlots:
    """Changed slots of a table: of its rows, and of the keys that have no row yet."""

    rows: np.ndarray
    candidates: np.ndarray


@dataclasses.dataclass
class _Save:
    """A save, the slots that changed between it and the next one, and if another one replaced it.

    `used` grows with the last use.
    """

    used: int
    changes: list[ChangedSlots] = dataclasses.field(default_factory=list[ChangedSlots])
    is_replaced: bool = False

    def add(self, changes: list[ChangedSlots]) -> None:
        self.changes += changes
        if len(self.changes) > _MOST_LISTS:
            self.changes = [_union(self.changes)]


class SaveHistory:
    """Saves of a table by identity, and what changed after each. Callers serialize calls.

    Changes are followed from the first `take` on: a table that is never saved has no cost.
    """

    def __init__(self, rows: KeySlots, candidates: KeySlots) -> None:
        self._rows, self._candidates = rows, candidates
        self._saves: dict[str, _Save] = {}
        self._num_uses = 0

    def __contains__(self, save: object) -> bool:
        return save in self._saves

    @property
    def num_unsaved(self) -> int:
        """Number of slots that changed since the last `take`."""
        return len(self._rows.track()) + len(self._candidates.track())

    def take(self) -> ChangedSlots:
        """Returns the slots that changed since the last call."""
        taken = ChangedSlots(
            self._rows.track().take().astype(np.int32),
            self._candidates.track().take().astype(np.int32),
        )
        if self._saves:
            next(reversed(self._saves.values())).add([taken])
        return taken

    def since(self, save: str) -> ChangedSlots:
        """Returns the slots that changed after a save, up to the last `take`."""
        names = list(self._saves)
        later = names[names.index(save) :]
        return _union([one for name in later for one in self._saves[name].changes])

    def add(self, save: str, replaced: str | None = None) -> None:
        """Adds a save of the table as it is. Call it right after `take`.

        `replaced` is the save that it continues.
        """
        self._num_uses += 1
        if replaced in self._saves:
            self._saves[replaced].is_replaced = True
            self._saves[replaced].used = self._num_uses
        self._drop(save)
        self._saves[save] = _Save(self._num_uses)
        while len(self._saves) > _MOST_SAVES:
            order = {name: (not one.is_replaced, one.used) for name, one in self._saves.items()}
            self._drop(min(order, key=order.__getitem__))
        most_slots = max(_LEAST_SLOTS, self._rows.num_slots + self._candidates.num_slots)
        while self._num_slots() > most_slots:
            del self._saves[next(iter(self._saves))]  # a delta would be as large as the table

    def _drop(self, save: str) -> None:
        """Drops a save; an earlier one takes over its changes."""
        names = list(self._saves)
        if save not in names:
            return
        place = names.index(save)
        changes = self._saves.pop(save).changes
        if place:
            self._saves[names[place - 1]].add(changes)

    def _num_slots(self) -> int:
        return sum(
            len(one.rows) + len(one.candidates)
            for save in self._saves.values()
            for one in save.changes
        )


def _union(changes: list[ChangedSlots]) -> ChangedSlots:
    none = np.empty(0, np.int32)
    return ChangedSlots(
        np.unique(np.concatenate([none, *(one.rows for one in changes)])),
        np.unique(np.concatenate([none, *(one.candidates for one in changes)])),
    )
