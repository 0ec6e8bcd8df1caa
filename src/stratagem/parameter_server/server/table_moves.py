"""Moves of keyed tables to other servers: copies of rows to send, and rows that arrive.

A table has shards of its old and of its new layout until the move ends. Rows are copied in rounds:
each has the slots that changed, and the keys that were removed, since the round before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stratagem.errors import UnavailableError, explain
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.shards import ShardSpec, piece_rows
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.tables.key_slots import KeySlots, SavedKeys
from stratagem.parameter_server.server.tables.keyed_shard import KeyedMarks, KeyedShard
from stratagem.parameter_server.server.tables.row_formats import buckets_of
from stratagem.parameter_server.server.tables.table_copies import TableCopy

_NONE = np.empty(0, np.int64)


class TableMoves:
    """Handles requests about the move of keyed tables in progress. A restart forgets it."""

    def __init__(self, store: ServerVariables) -> None:
        self._store = store
        self._move = ""
        self._sources: dict[str, _MovedShard] = {}

    def begin(self, message: Message) -> dict[str, Any]:
        """Begins a move, and ends an earlier one.

        Fields: `move`, its identity; `tables`: by name on this server, `spec` of a shard to create,
        or None for one whose rows are copied.
        """
        self._stop()
        for name, own in message.fields["tables"].items():
            if own["spec"] is None:
                self._sources[name] = _MovedShard(self._store.keyed_shards[name])
            else:
                self._store.drop_tables([name])
                self._store.create(ShardSpec.from_fields(own["spec"]))
        self._move = message.fields["move"]
        return {}

    def copy(self, message: Message) -> Message:
        """Returns some changed rows. Fields: `move`, `name`, `round` and `first`, a place in it.

        The answer has the next place in `first`, None at the end, and in `left_bytes` the size of
        what changed since the round began. `clock` is the version with which ages compare.
        """
        self._require(message)
        fields = message.fields
        source = self._sources[fields["name"]]
        with self._store.changing():
            source.begin_round(fields["round"])
        return source.piece(fields["first"], self._store.version)

    def put(self, message: Message) -> dict[str, Any]:
        """Adds rows. Fields: `move`, `name`, `slots`, `initials`, `shift` of the ages.

        Arrays: removed keys of rows and of candidates, keys, last versions and counts of both,
        rows, and those of the optimizer slots.
        """
        self._require(message)
        fields, arrays = message.fields, iter(message.arrays)
        shard = self._store.keyed_shards[fields["name"]]
        for slots in (shard.keyed.rows, shard.keyed.candidates):
            found = slots.find(np.unique(next(arrays)))
            slots.remove(found[found >= 0])
        rows, candidates = (_received(arrays, fields["shift"]) for _ in range(2))
        value, slots = next(arrays), dict(zip(fields["slots"], arrays, strict=True))
        shard.put(rows, value, slots, fields["initials"])
        _put_keys(shard.keyed.candidates, candidates)
        self._store.num_changes += 1
        return {}

    def end(self, message: Message) -> dict[str, Any]:
        """Completes new shards, once no update is made. Array: optimizer scalars `scalars`.

        Fields: `move`; `tables`: by name, `clock`, `counters`, `initials` of the optimizer slots,
        `spec` with its limit of rows, and `late`: first bucket, number of buckets and
        versions by which the rows from each shard are too old.
        """
        self._require(message)
        for name, own in message.fields["tables"].items():
            shard = self._store.keyed_shards[name]
            keyed = shard.keyed
            for slot in shard.slots.keys() - own["initials"].keys():
                shard.drop_slot(slot)
            for slots in (keyed.rows, keyed.candidates):
                _make_older(slots, own["late"])
            keyed.counters.update(own["counters"])
            keyed.version_offset = own["clock"] - self._store.version
            shard.limit(ShardSpec.from_fields(own["spec"]))
        scalars = dict(zip(message.fields["scalars"], message.arrays, strict=True))
        self._store.set_scalars(scalars)
        self._store.num_changes += 1
        return {}

    def place(self, message: Message) -> dict[str, Any]:
        """Records the layouts of tables, as JSON by name, which decides where their rows are."""
        self._store.place_tables(message.fields["layouts"])
        return {}

    def drop(self, message: Message) -> dict[str, Any]:
        """Drops shards, those of the field `names` that are there, and ends the move."""
        self._stop()
        self._store.drop_tables(message.fields["names"])
        return {}

    def _require(self, message: Message) -> None:
        if message.fields["move"] != self._move:
            raise UnavailableError(
                explain(
                    "A parameter server was restarted while keyed tables were moved.",
                    expected="servers that run until the end of the move.",
                    fix="move the tables again.",
                )
            )

    def _stop(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._move = ""


class _MovedShard:
    """A shard whose rows are copied while they change."""

    def __init__(self, shard: KeyedShard) -> None:
        self._shard = shard
        self._copy = TableCopy(shard, None)
        self._round = -1
        self._marks = KeyedMarks(_NONE, _NONE)
        self._removed = [_NONE, _NONE]
        self._copy.begin()
        for slots in self._kinds:
            slots.removed = []

    def begin_round(self, number: int) -> None:
        """Notes what to copy in a round, once. Call while no update is made."""
        if number == self._round:
            return
        self._round = number
        if number:
            self._marks = self._copy.next()
        else:
            self._copy.begin()
            self._marks = self._copy.first()
        for place, slots in enumerate(self._kinds):
            self._removed[place] = np.concatenate([_NONE, *(slots.removed or ())])
            slots.removed = []

    def piece(self, first: int, version: int) -> Message:
        """Returns the rows, then the candidates, from a place of the round on."""
        shard, rows, candidates = self._shard, self._marks.rows, self._marks.candidates
        num_slots = shard.keyed.rows.num_slots + shard.keyed.candidates.num_slots
        end = first + piece_rows(shard.size_bytes, num_slots)
        later = slice(max(0, first - len(rows)), max(0, end - len(rows)))
        part = shard.saved(KeyedMarks(rows[first:end], candidates[later]))
        keys = [*self._removed] if not first else [_NONE, _NONE]
        for one in (part.table.rows, part.table.candidates):
            keys += [one.keys, one.seen, one.counts]
        fields = {
            "first": end if end < len(rows) + len(candidates) else None,
            "left_bytes": self._copy.unsaved_bytes,
            "clock": version + shard.keyed.version_offset,
            "counters": dict(shard.keyed.counters),
            "slots": list(part.slots),
            "initials": dict(part.table.initials),
        }
        return Message("ok", fields, [*keys, part.value, *part.slots.values()])

    def close(self) -> None:
        """Notes no more removed keys."""
        for slots in self._kinds:
            slots.removed = None

    @property
    def _kinds(self) -> tuple[KeySlots, KeySlots]:
        return self._shard.keyed.rows, self._shard.keyed.candidates


def _received(arrays: Iterator[np.ndarray], shift: int) -> SavedKeys:
    keys, seen, counts = (next(arrays) for _ in range(3))
    return SavedKeys(_NONE, keys, seen + np.uint32(shift), counts, _NONE)


def _put_keys(slots: KeySlots, keys: SavedKeys) -> None:
    found = slots.find(keys.keys)
    found[found < 0] = slots.add(keys.keys[found < 0])
    slots.set(found, keys)


def _make_older(slots: KeySlots, late: Sequence[Sequence[int]]) -> None:
    """Corrects ages of rows: servers whose rows were copied may have made different numbers."""
    if not any(versions for _, _, versions in late):
        return
    used = slots.used
    buckets = buckets_of(slots.index.keys[used])
    for first, count, versions in late:
        own = used[(buckets >= first) & (buckets < first + count)]
        slots.seen[own] += np.uint32(versions % 2**32)
        slots.mark(own)
