"""Copies of keyed tables as they are between two updates, while updates continue.

Rows are copied in pieces. Those that changed meanwhile are copied again, until so few are left that
they are copied at once, while no update is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from stratagem.parameter_server.server.shards import SavedPart
from stratagem.parameter_server.server.tables.keyed_shard import KeyedMarks, KeyedShard
from stratagem.parameter_server.server.tables.save_history import ChangedSlots
from stratagem.parameter_server.server.tables.table_files import SavedRows, TableEnd

# Copied at once while no update is made, unless more rounds than this do not suffice.
_MOST_COPIED_BYTES = 2**22
_MOST_ROUNDS = 8


class ChangingStore(Protocol):
    """Variables of a server."""

    version: int

    def changing(self) -> AbstractContextManager[object]:
        """Returns a context without updates."""
        ...


class TableCopy:
    """One table to copy: all of it, or what changed since a save, if the server remembers that.

    `base` is then that save, and otherwise None. `end` is set by the last part.
    """

    def __init__(self, shard: KeyedShard, base: str | None) -> None:
        self.shard = shard
        self.base = base
        self.end: TableEnd | None = None

    def begin(self) -> None:
        """Begins a copy. Call while no update is made."""
        self.shard.history.take()

    def first(self) -> KeyedMarks:
        """Returns the slots to copy first."""
        history = self.shard.history
        if self.base is None or self.base not in history:
            self.base = None
            keyed = self.shard.keyed
            rows = np.arange(keyed.rows.num_slots, dtype=np.int32)
            return KeyedMarks(rows, np.arange(keyed.candidates.num_slots, dtype=np.int32))
        return _marks(history.since(self.base))

    def next(self) -> KeyedMarks:
        """Returns the slots that changed since the last call. Call while no update is made."""
        return _marks(self.shard.history.take())

    def last(self, version: int, save: str) -> SavedRows:
        """Returns the last changed slots. Call while no update is made."""
        part = saved_rows(self.shard.saved(self.next()))
        self.shard.history.add(save, self.base)
        keyed = self.shard.keyed
        self.end = TableEnd(
            version + keyed.version_offset,
            keyed.rows.order(),
            keyed.candidates.order(),
            dict(keyed.counters),
            dict(self.shard.initials),
        )
        return part

    def pieces(self, marks: KeyedMarks) -> Iterator[SavedRows]:
        """Yields copies of the marked slots."""
        return map(saved_rows, self.shard.pieces(marks))

    @property
    def unsaved_bytes(self) -> int:
        """Size of the rows that changed since the last call of `begin` or `next`."""
        return self.shard.history.num_unsaved * self.shard.row_bytes


def copied(
    store: ChangingStore, copies: Sequence[TableCopy], save: str
) -> Iterator[tuple[TableCopy, SavedRows]]:
    """Yields the parts of all tables, as they are at one moment, when the last round begins.

    A later part of a table replaces slots of an earlier one.
    """
    with store.changing():
        for copy in copies:
            copy.begin()
    marks, last = [copy.first() for copy in copies], list[SavedRows]()
    for number in range(_MOST_ROUNDS + 1):
        for copy, own in zip(copies, marks, strict=True):
            for part in copy.pieces(own):
                yield copy, part
        with store.changing():
            left_bytes = sum(copy.unsaved_bytes for copy in copies)
            if number == _MOST_ROUNDS or left_bytes <= _MOST_COPIED_BYTES:
                last = [copy.last(store.version, save) for copy in copies]
                break
            marks = [copy.next() for copy in copies]
    yield from zip(copies, last, strict=True)


def saved_rows(part: SavedPart) -> SavedRows:
    """Returns a part of a journal as one of a file."""
    return SavedRows(part.table.rows, part.table.candidates, part.value, part.slots)


def _marks(slots: ChangedSlots) -> KeyedMarks:
    return KeyedMarks(slots.rows, slots.candidates)
