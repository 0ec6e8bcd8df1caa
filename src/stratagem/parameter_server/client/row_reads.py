"""Lookups of table rows: each distinct row once, from the cache or from its server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from stratagem.parameter_server.client.cached_rows import CachedRows
from stratagem.parameter_server.client.distinct_rows import DistinctIds, DistinctRows
from stratagem.parameter_server.client.request_partitioning import RequestParts, shard_name
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.versions import SeenVersions
from stratagem.transport.wire import Message

__all__ = ["RowReads"]

_Ask = Callable[[dict[int, Message], Callable[[int], Sequence[str]]], dict[int, Message]]


class RowReads:
    """Reads rows of variables. Thread-safe.

    `ask` sends requests and records the versions in the answers. `row_cache` None reads all rows
    from the servers. `distinct` finds the distinct ids of a lookup.
    """

    def __init__(
        self,
        ask: _Ask,
        seen: SeenVersions,
        row_cache: RowCache | None,
        distinct: DistinctIds,
    ) -> None:
        self._ask = ask
        self._seen = seen
        self._distinct = distinct
        self.cached: CachedRows | None = None
        if row_cache is not None and row_cache.max_age_steps > 0:
            self.cached = CachedRows(row_cache)

    def pull(
        self, placement: ShardLayout, slot: str, ids: np.ndarray, *, may_be_cached: bool
    ) -> np.ndarray:
        """Returns rows of a variable or its slot ":slot", of shape (*ids.shape, ...)."""
        wanted = self._distinct.of(placement, ids.reshape(-1))
        if self.cached is None or not may_be_cached or slot:
            rows = wanted.expanded(self._fetch(placement, slot, wanted)[0])
        else:
            rows, versions = self.cached.rows(
                placement, wanted, lambda missing: self._fetch(placement, slot, missing)
            )
            oldest = self.cached.oldest(placement, wanted, versions)
            self._seen.note_oldest(placement.name, oldest)
        return rows.reshape(*ids.shape, *placement.shape[1:])

    @contextlib.contextmanager
    def writing(self, name: str) -> Generator[None]:
        """Drops cached rows of a variable that is written in a `with` block, also if that fails."""
        try:
            yield
        finally:
            if self.cached is not None:
                self.cached.drop(name)

    @contextlib.contextmanager
    def pushing(self, rows: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Generator[None]:
        """Notes that gradients of rows, by variable name, are sent in a `with` block."""
        try:
            yield
        finally:
            if self.cached is not None:
                for name, (ids, _) in rows.items():
                    self.cached.note_pushed(name, ids)

    def note_lifetime(self, server: int, lifetime: int) -> None:
        """Drops cached rows if a server restarted: `lifetime` is the number of its run."""
        if self.cached is not None:
            self.cached.note_lifetime(server, lifetime)

    def begin_step(self) -> None:
        """Begins a step of this thread, the unit of the age of cached rows."""
        if self.cached is not None:
            self.cached.begin_step()

    def drop_cached(self) -> None:
        """Drops all cached rows, after a write by another process or discarded gradients."""
        if self.cached is not None:
            self.cached.clear()

    def take_counts(self) -> dict[str, int]:
        """Returns the cache's new "hits" and "misses"; see `CachedRows.take_counts`."""
        return {} if self.cached is None else self.cached.take_counts()

    def _fetch(
        self, placement: ShardLayout, slot: str, wanted: DistinctRows
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of distinct ids, and the version of each."""
        parts = RequestParts()
        held = [one for one in wanted.held(placement) if len(one[2])]
        for shard, _, numbers in held:
            parts.add(placement.servers[shard], shard_name(placement, shard) + slot, numbers)
        answers = self._ask(parts.messages("pull_rows"), lambda server: [placement.name])
        arrays = {server: iter(answer.arrays) for server, answer in answers.items()}
        rows = [next(arrays[placement.servers[shard]]) for shard, _, _ in held]
        versions = np.empty(len(wanted.ids), np.int64)
        for shard, part, _ in held:
            versions[part] = answers[placement.servers[shard]].fields["version"]
        if len(rows) == 1:
            return rows[0], versions
        empty = np.empty((0, *placement.shape[1:]), placement.dtype)
        return np.concatenate(rows) if rows else empty, versions
