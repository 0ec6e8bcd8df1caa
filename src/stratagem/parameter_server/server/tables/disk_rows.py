"""Folder with the rows of a keyed table on disk: keys and rows by slot."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.closing import Closing
from stratagem.errors import DataLossError
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.messages import explain
from stratagem.parameter_server.server.tables.key_slots import SavedKeys
from stratagem.parameter_server.server.tables.row_file import RowFile

Position = tuple[int, int]  # of a journal entry: its lifetime, and the changes in it

_FORMAT = 1
_MANIFEST, _KEYS = "rows.json", "keys"
_KEY_TYPE = np.dtype([("key", np.int64), ("seen", np.uint32), ("count", np.uint32)])


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """Rows read from disk, unchecked.

    Args:
        slots: slots in order.
        parts: files and the records of the slots in each.
    """

    slots: np.ndarray
    parts: Sequence[tuple[RowFile, np.ndarray]]

    def are_valid(self) -> np.ndarray:
        """Returns False for each damaged row."""
        are_valid = np.ones(len(self.slots), np.bool_)
        for file, records in self.parts:
            are_valid &= file.are_valid(self.slots, records)
        return are_valid

    def fill(self, column: str, values: np.ndarray) -> None:
        """Copies a column to `values`, where one was written."""
        for file, records in self.parts:
            if column in (records.dtype.names or ()):
                are_written = file.are_written(records)
                values[are_written] = records[column][are_written]


class DiskRows(Closing):
    """Keys and rows by slot, in files: one of keys, and one for all columns that began together.

    `rows_id` is random: a journal has that of its rows. Each write has the position of the last
    journal entry, and that is on disk before the rows: see `position`.

    Rows that were loaded later are in a folder beside the first one, whose name has their id. All
    other folders of the table are removed, unless `beside` is given.

    Args:
        folder: folder of one table of one server.
        rows_id: rows that must be there; None to begin without rows.
        beside: rows that stay, in this process.

    Raises:
        DataLossError: other rows are there, or none.
        OSError: the folder cannot be read or written.
        UnavailableError: another process uses the folder.
    """

    def __init__(
        self, folder: Path, rows_id: str | None = None, *, beside: DiskRows | None = None
    ) -> None:
        self._base = self._folder = folder
        self._groups: list[dict[str, list[Any]]] = []
        self._files: list[RowFile] = []
        self.position: Position = (0, 0)
        self.written_bytes = self.read_bytes = self.num_read = 0
        with contextlib.ExitStack() as stack:
            if beside is None:
                self._lock = stack.enter_context(JournalLock(Path(f"{folder}.lock")))
            else:
                self._lock = beside._lock
            self.rows_id = secrets.token_hex(8) if rows_id is None else rows_id
            loaded = folder.with_name(f"{folder.name}+{self.rows_id}")
            if beside is not None or loaded.is_dir():
                self._folder = loaded
            if rows_id is not None:
                self._read_manifest()
            if beside is None:
                self._remove_folders(kept=None if rows_id is None else self._folder)
            if rows_id is None:
                self._folder.mkdir(mode=0o700)
                self._write_manifest()
            self._keys = RowFile(self._folder / _KEYS, _KEY_TYPE)
            stack.pop_all()  # the lock stays

    @property
    def size_bytes(self) -> int:
        """Disk space in use."""
        return sum(file.size_bytes for file in (self._keys, *self._files))

    @property
    def columns(self) -> list[str]:
        """Names of all columns that were ever written."""
        return [name for group in self._groups for name in group]

    def read(self, slots: np.ndarray) -> FetchedRows:
        """Reads rows of slots, given in order."""
        rows = FetchedRows(slots, [(file, file.read(slots)) for file in [*self._files]])
        self.num_read += len(slots)
        self.read_bytes += sum(records.nbytes for _, records in rows.parts)
        return rows

    def write(self, position: Position, keys: SavedKeys, columns: Mapping[str, np.ndarray]) -> None:
        """Writes keys and the rows of `columns`, given in the order of slots.

        Args:
            position: position of a journal entry on disk that has them, or of a later one.
            keys: slots in use, and freed ones.
            columns: values of each column.

        Raises:
            OSError: the disk is full, or fails.
        """
        new = {
            name: [one.dtype.name, list(one.shape[1:])]
            for name, one in columns.items()
            if name not in self.columns
        }
        if new or position > self.position:
            self.position = max(position, self.position)
            self._groups += [new] if new else []
            self._write_manifest()
            self._open_files()
        for file, group in zip(self._files, self._groups, strict=True):
            records = file.empty(len(keys.slots))
            for name in group.keys() & columns.keys():
                records[name] = columns[name]
            file.write(keys.slots, records)
            self.written_bytes += records.nbytes
        records = self._keys.empty(len(keys.slots))
        records["key"], records["seen"], records["count"] = keys.keys, keys.seen, keys.counts
        self._keys.write(keys.slots, records)
        self._keys.erase(keys.freed)
        self.written_bytes += records.nbytes

    def sync(self) -> None:
        """Waits until all rows are on disk."""
        for file in (*self._files, self._keys):
            file.sync()

    def scan(self) -> Iterator[tuple[SavedKeys, np.ndarray]]:
        """Yields all keys, and the slots of damaged ones, which are not among them."""
        for slots, records in self._keys.scan():
            are_valid = self._keys.are_valid(slots, records)
            is_used = are_valid & self._keys.are_written(records)
            used = records[is_used]
            none = np.empty(0, np.int64)
            keys = SavedKeys(slots[is_used], used["key"], used["seen"], used["count"], none)
            yield keys, slots[~are_valid]

    def close(self) -> None:
        """Closes all files."""
        for file in (self._keys, *self._files):
            file.close()
        self._lock.close()

    def emptied(self) -> DiskRows:
        """Returns a place beside these rows, without any. Both have the same lock."""
        return DiskRows(self._base, beside=self)

    def discard(self) -> None:
        """Removes the files. Reads by other threads may end; then the files are closed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove(self) -> None:
        """Closes and removes everything, and the folder of the server if it is then empty."""
        self.close()
        self._remove_folders()
        with contextlib.suppress(OSError):
            Path(f"{self._base}.lock").unlink()
            self._base.parent.rmdir()

    def _remove_folders(self, kept: Path | None = None) -> None:
        """Removes all folders of the table but one."""
        loaded = self._base.parent.glob(f"{glob.escape(self._base.name)}+*")
        for one in {self._base, *loaded} - {kept}:
            shutil.rmtree(one, ignore_errors=True)

    def _open_files(self) -> None:
        for number in range(len(self._files), len(self._groups)):
            fields = [(name, *own) for name, own in self._groups[number].items()]
            dtype = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in fields])
            self._files.append(RowFile(self._folder / f"rows-{number}", dtype))

    def _write_manifest(self) -> None:
        fields = {"format": _FORMAT, "id": self.rows_id, "position": self.position}
        new = self._folder / f"{_MANIFEST}.new"
        with new.open("w", encoding="utf-8") as file:
            json.dump({**fields, "groups": self._groups}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._folder / _MANIFEST)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read_manifest(self) -> None:
        try:
            fields = json.loads((self._folder / _MANIFEST).read_text(encoding="utf-8"))
            found, version = fields["id"], fields["format"]
            first, second = fields["position"]
            groups = [dict(group) for group in fields["groups"]]
        except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
            raise self.lost(f"it has no valid {_MANIFEST} ({type(error).__name__})") from error
        if (found, version) != (self.rows_id, _FORMAT):
            raise self.lost("its rows are of another journal, or of another format")
        self.position, self._groups = (int(first), int(second)), groups
        self._open_files()

    def lost(self, how: str) -> DataLossError:
        """Returns the error of rows that do not fit a journal."""
        return DataLossError(
            explain(
                f"The rows on disk in {self._folder} cannot be used: {how}.",
                expected="the folder of a table's tiers as its server left it, and the journal "
                "of the same server.",
                fix="restore both, or start the servers with an empty journal_dir and restore a "
                "checkpoint.",
                code="SG610",
            )
        )
