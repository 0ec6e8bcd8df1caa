"""Requests about whole keyed tables: saving, loading, and reading of all rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import DataLossError, explain
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.shards import SavedPart, piece_rows
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.tables.keyed_shard import (
    KeyedMarks,
    KeyedShard,
)
from stratagem.parameter_server.server.tables.saved_tables import (
    SavedRows,
    TableEnd,
    TableFileWriter,
    TableHead,
)
from stratagem.parameter_server.server.tables.table_chains import TableChain, load_table
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard

# Copies of keyed tables as they are between two updates, while updates continue.
#
# Rows are copied in pieces. Those that changed meanwhile are copied again, until so few are left
# that they are copied at once, while no update is made.


# Copied at once while no update is made, unless more rounds than this do not suffice.
_MOST_COPIED_BYTES = 2**22
_MOST_ROUNDS = 8


class TableCopy:
    """One table to copy: all of it, or what changed since a save, if the server remembers that.

    `base` is then that save, and otherwise None. `end` is set by the last part.
    """

    def __init__(self, shard: KeyedShard, base: str | None) -> None:
        self.shard = shard
        self.base = base if base in shard.saves else None
        self.end: TableEnd | None = None

    def first(self) -> KeyedMarks:
        """Returns the slots to copy first."""
        keyed = self.shard.keyed
        if self.base is not None:
            return self.shard.changed(self.shard.saves[self.base] - keyed.version_offset)
        rows = np.arange(keyed.rows.num_slots, dtype=np.int32)
        return KeyedMarks(rows, np.arange(keyed.candidates.num_slots, dtype=np.int32))

    def last(self, marks: KeyedMarks, version: int, save: str) -> SavedRows:
        """Returns the last changed slots. Call while no update is made."""
        keyed = self.shard.keyed
        part = self.shard.saved(marks)
        self.shard.note_save(save, version)
        self.end = TableEnd(
            version + keyed.version_offset,
            keyed.rows.order(),
            keyed.candidates.order(),
            dict(keyed.counters),
            dict(self.shard.initials),
        )
        return _saved_rows(part)


def copied(
    store: ServerVariables, copies: Sequence[TableCopy], save: str
) -> Iterator[tuple[TableCopy, SavedRows]]:
    """Yields the parts of all tables, as they are at one moment, when the last round begins.

    A later part of a table replaces slots of an earlier one.
    """
    version = store.version  # of the round: what changes now is copied in the next one
    marks, last = [copy.first() for copy in copies], list[SavedRows]()
    for number in range(_MOST_ROUNDS + 1):
        for copy, own in zip(copies, marks, strict=True):
            for part in copy.shard.pieces(own):
                yield copy, _saved_rows(part)
        with store.changing():
            marks = [copy.shard.changed(version) for copy in copies]
            version = store.version
            left_bytes = sum(
                (len(own.rows) + len(own.candidates)) * copy.shard.row_bytes
                for copy, own in zip(copies, marks, strict=True)
            )
            if number == _MOST_ROUNDS or left_bytes <= _MOST_COPIED_BYTES:
                pairs = zip(copies, marks, strict=True)
                last = [copy.last(own, version, save) for copy, own in pairs]
                break
    yield from zip(copies, last, strict=True)


def _saved_rows(part: SavedPart) -> SavedRows:
    """Returns a part of a journal as one of a file."""
    return SavedRows(part.table.rows, part.table.candidates, part.value, part.slots)


class TableRequests:
    """Handles requests about keyed tables of a server."""

    def __init__(self, store: ServerVariables) -> None:
        self._store = store
        self._saving = threading.Lock()

    def save(self, request: Request) -> None:
        """Writes tables to files in a thread of its own, which then answers.

        Fields: `folder`; `save`, the identity of this save; `tables`: by name on this server,
        `file` (name in the folder), `table`, `part`, and `base` (save to continue, or None).
        """

        def run() -> None:
            try:
                with self._saving:
                    answer = self._saved(request.message.fields)
                request.answer(answer)
            except OSError as error:
                request.answer(Message("failed", {"text": str(error)}))
            except BaseException as error:  # noqa: BLE001 - sent to the client
                request.fail(error)

        threading.Thread(target=run, name="saved-tables", daemon=True).start()

    def check(self, message: Message) -> Message:
        """Verifies the files that `load` will read; the fields are the same.

        The answer has the text of the error of a damaged file in `damage`, or None.
        """
        try:
            for described in message.fields["tables"].values():
                with _opened(message.fields["folder"], described):
                    pass
        except DataLossError as error:
            return Message("ok", {"damage": str(error)})
        return Message("ok", {"damage": None})

    def load(self, message: Message) -> None:
        """Replaces tables with saved ones. A damaged file raises before anything changes.

        A table with tiers is replaced when all of its rows are on disk: until then, and if that
        fails, the former one stays. Another table is empty if this fails.

        Fields: `folder`; `tables`: by name on this server, `buckets` (first one and number),
        `chains` (see `TableChain`), `storage_dtype` of the saved rows, and `save`, the identity of
        the loaded version.
        """
        fields = message.fields
        with contextlib.ExitStack() as stack:
            opened = {
                name: stack.enter_context(_opened(fields["folder"], described))
                for name, described in fields["tables"].items()
            }
            with self._store.changing(), contextlib.ExitStack() as failed:
                loaded: list[TieredShard] = []
                for name in sorted(opened, key=self._is_in_memory):
                    described = fields["tables"][name]
                    loaded += self._load_table(name, opened[name], described, failed)
                for table in loaded:
                    self._store.tiers.replace(table)
                    self._store.replace_table(table)
                failed.pop_all()
                self._store.num_changes += 1

    def export_rows(self, message: Message) -> Message:
        """Returns some rows. Fields: `name`; `first`, a slot; `with_keys`.

        The answer has the next slot in `first`, None at the end. Its arrays are rows, and keys.
        """
        fields = message.fields
        table = self._store.keyed_shards[fields["name"]]
        if fields["with_keys"] and not (table.spec.table or {}).get("allow_row_export"):
            raise PermissionError(f"keys of {table.spec.name!r} were requested: not allowed")
        num_slots = table.keyed.rows.num_slots
        first = fields["first"]
        end = min(num_slots, first + piece_rows(table.row_bytes, 1))
        part = table.copied_slots(np.arange(first, end))
        keys = [part.table.rows.keys] if fields["with_keys"] else []
        arrays = [table.format.expanded(part.value), *keys]
        return Message("ok", {"first": None if end == num_slots else end}, arrays)

    def _saved(self, fields: Mapping[str, Any]) -> Message:
        folder, save = Path(fields["folder"]), fields["save"]
        missing = {(folder / one["file"]).parent for one in fields["tables"].values()}
        missing = {str(one) for one in missing if not one.is_dir()}
        if missing:
            raise FileNotFoundError(
                explain(
                    f"A parameter server does not see the folder {sorted(missing)[0]}.",
                    expected="a folder that this process and all servers share.",
                    fix="save to a file system that all machines have mounted at the same path.",
                )
            )
        with contextlib.ExitStack() as stack:
            writers: dict[TableCopy, TableFileWriter] = {}
            for name, own in fields["tables"].items():
                copy = TableCopy(self._store.keyed_shards[name], own["base"])
                writer = TableFileWriter(folder / own["file"], _head_of(copy, save, own))
                writers[copy] = stack.enter_context(writer)
            for copy, part in copied(self._store, list(writers), save):
                writers[copy].add(part)
            parts: dict[str, Any] = {}
            for name, (copy, writer) in zip(fields["tables"], writers.items(), strict=True):
                assert copy.end is not None
                size_bytes = writer.end(copy.end)
                parts[name] = {
                    "base": copy.base,
                    "size_bytes": size_bytes,
                    "rows": writer.num_rows,
                    "slots": sorted(copy.end.initials),
                }
        return Message("ok", {"parts": parts})

    def _is_in_memory(self, name: str) -> bool:
        return not isinstance(self._store.keyed_shards[name], TieredShard)

    def _load_table(
        self,
        name: str,
        chains: list[TableChain],
        described: Mapping[str, Any],
        failed: contextlib.ExitStack,
    ) -> list[TieredShard]:
        """Replaces a table, or returns one with tiers that is to replace it.

        A table in memory is replaced before it is loaded: memory may not hold two. `failed` removes
        files.
        """
        old = self._store.keyed_shards[name]
        sizes = old.keyed.rows.num_slots, old.keyed.candidates.num_slots
        table = old.emptied()
        if isinstance(table, TieredShard):
            failed.callback(table.discard)
            self._fill(table, chains, described, sizes)
            return [table]
        self._store.replace_table(table)
        self._store.num_changes += 1
        del old
        try:
            self._fill(table, chains, described, sizes)
        except BaseException:
            table = table.emptied()
            table.loaded(*sizes)
            self._store.replace_table(table)
            raise
        return []

    def _fill(
        self,
        table: KeyedShard,
        chains: list[TableChain],
        described: Mapping[str, Any],
        sizes: tuple[int, int],
    ) -> None:
        """Loads saved rows into an empty table; `sizes` are those of the former one."""
        first, count = described["buckets"]
        storage_dtype = described["storage_dtype"]
        buckets = range(first, first + count)
        is_same = load_table(table, chains, buckets, self._store.version, storage_dtype)
        table.loaded(*sizes)
        if is_same and storage_dtype == table.format.storage_dtype:
            table.note_save(described["save"], self._store.version)  # changes continue it


@contextlib.contextmanager
def _opened(folder: str, described: Mapping[str, Any]) -> Generator[list[TableChain]]:
    """Opens and verifies the files of one table."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(TableChain(Path(folder), one)) for one in described["chains"]]


def _head_of(copy: TableCopy, save: str, own: Mapping[str, Any]) -> TableHead:
    stored = copy.shard.format
    name = stored.stored_dtype.name
    return TableHead(save, copy.base, own["table"], own["part"], stored.stored_shape, name)
