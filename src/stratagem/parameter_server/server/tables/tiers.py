"""Tables of a server with rows on disk: reads before changes, and writes after journal entries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from stratagem.parameter_server.server.tables.disk_rows import Position
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard
from stratagem.resources import Closing


class Tiers(Closing):
    """Tables whose rows beyond a memory limit are on disk.

    `position` is that of the last journal entry on disk. `save` writes all changes to the journal
    and then rows to disk, so that memory can be used for others; a `StateJournal` sets it. Without
    a journal, rows are written to disk alone.

    Args:
        changing: context that blocks changes.
    """

    def __init__(self, changing: Callable[[], AbstractContextManager[Any]]) -> None:
        self._changing = changing
        self._shards: dict[str, TieredShard] = {}
        self._retired: list[TieredShard] = []
        self._saving = threading.Lock()
        self.position: Position = (0, 0)
        self.save: Callable[[], Any] = self._save_without_journal

    @property
    def has_tables(self) -> bool:
        """True if requests may wait for the disk."""
        return bool(self._shards)

    def add(self, shard: TieredShard) -> None:
        """Adds a table."""
        self._shards[shard.spec.name] = shard

    def replace(self, table: TieredShard) -> None:
        """Replaces a table by a loaded one. Call within `changing`.

        The files of the former one are removed when a journal entry names those of the loaded one.
        """
        self._retired.append(self._shards[table.spec.name])
        self.add(table)
        if self.save == self._save_without_journal:
            self._discard_retired(is_any=True)

    def warm(self, rows: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Reads the rows of an update into memory, before the update blocks others.

        Waits for the disk if too many rows changed since they were written.
        """
        for name in rows.keys() & self._shards.keys():
            if self._shards[name].is_full:
                with contextlib.suppress(OSError):  # reported by the server; memory grows
                    self.save()
            self._shards[name].warm(rows[name][0])

    def flush(self, position: Position) -> None:
        """Records a journal entry on disk, and writes rows to disk if that makes room.

        Raises:
            OSError: the disk is full, or fails.
        """
        self.position = position
        for shard in [*self._shards.values()]:
            shard.flush(position)
        self._discard_retired()

    def close(self, *, removes: bool = False) -> None:
        """Closes all files, and removes them if no later run uses them."""
        for shard in self._shards.values():
            if removes:
                shard.remove()
            else:
                shard.close()

    def _discard_retired(self, *, is_any: bool = False) -> None:
        for old in [*self._retired]:
            if is_any or self._shards[old.spec.name].is_journaled:
                old.discard()
                self._retired.remove(old)

    def _save_without_journal(self) -> None:
        with self._saving:
            for shard in [*self._shards.values()]:
                with self._changing():
                    shard.take_marks()
            self.flush(self.position)
