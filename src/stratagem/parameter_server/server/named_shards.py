"""Shards of a server by name, and their sizes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from stratagem.parameter_server.server.shards import Shard
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard


class NamedShards:
    """Thread-safe mapping of shards by name."""

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = {}
        self._reading = threading.Lock()
        self.layouts: dict[str, Any] = {}  # of keyed tables that were moved, as JSON

    @property
    def names(self) -> list[str]:
        """Names of all variables."""
        with self._reading:
            return list(self._shards)

    @property
    def size_bytes(self) -> int:
        """Size of all variables and slots, in bytes."""
        with self._reading:
            return sum(shard.size_bytes for shard in self._shards.values())

    @property
    def marked_bytes(self) -> int:
        """Size of the table rows that changed since the last journal entry, in bytes."""
        with self._reading:
            return sum(shard.marked_bytes for shard in self._shards.values())

    @property
    def keyed_shards(self) -> dict[str, KeyedShard]:
        """Keyed tables, by name."""
        with self._reading:
            shards = list(self._shards.values())
        return {one.spec.name: one for one in shards if isinstance(one, KeyedShard)}

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        """Sizes and counters of keyed tables, by name."""
        return {name: shard.described() for name, shard in self.keyed_shards.items()}

    def keep_tables(self, names: Collection[str]) -> None:
        """Drops keyed tables with other names. Call within `changing`."""
        dropped = self.keyed_shards.keys() - names
        with self._reading:
            for name in dropped:
                del self._shards[name]

    def replace_table(self, table: KeyedShard) -> None:
        """Replaces the keyed table with the same spec. Call within `changing`."""
        with self._reading:
            self._shards[table.spec.name] = table
