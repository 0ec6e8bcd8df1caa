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

from stratagem.errors import DataLossError, explain
from stratagem.group.transport.journal import JournalLock
from stratagem.parameter_server.server.tables.key_slots import SavedKeys
from stratagem.parameter_server.server.tables.row_formats import GOLDEN, mix64
from stratagem.parameter_server.server.tables.saved_tables import write_durably
from stratagem.resources import Closing

# Records of fixed size in a file, by number, for many numbers per call.

_CHECK, _PAD = "check", "pad"
_CHUNK_BYTES = 2**22  # read at once by `scan`
_GROWTH = 1.25
_LEAST_GROWTH_BYTES = 2**20
_PAGE_BYTES = 4096


class RowFile(Closing):
    """File of records with the fields of `dtype`, each with a checksum.

    Numbers of a call are sorted and distinct. A number that was never written has a record of
    zeros. Records that were written since the last `sync` may be lost, or damaged, if the machine
    stops. Reads and writes may be made by several threads. A file that is removed can be read until
    nothing refers to it.

    Args:
        path: file, which is created if it does not exist.
        dtype: structured type of a record.
    """

    _file = -1

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        fields = [(name, dtype[name]) for name in dtype.names or ()]
        pad = -dtype.itemsize % 8
        self._names = list(dtype.names or ())
        self._dtype = np.dtype([(_CHECK, np.uint64), *fields, (_PAD, np.uint8, (pad,))])
        self.record_bytes = self._dtype.itemsize
        words = np.arange(self.record_bytes // 8 - 1, dtype=np.uint64)
        self._weights = mix64(words) | np.uint64(1)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Without it, the system reads more pages than are wanted.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._end_bytes = os.fstat(self._file).st_size

    @property
    def size_bytes(self) -> int:
        """Disk space in use."""
        return os.fstat(self._file).st_blocks * 512

    def empty(self, count: int) -> np.ndarray:
        """Returns records of zeros, to be filled and written."""
        return np.zeros(count, self._dtype)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns records, unchecked: see `are_valid`.

        All reads are announced first: the disk works on many of them at the same time.
        """
        if not len(numbers):
            return self.empty(0)
        parts = self._parts(numbers)
        for begin, size in parts:
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_WILLNEED)
        data = b"".join([self._read(begin, size) for begin, size in parts])
        return np.frombuffer(data, self._dtype)

    def write(self, numbers: np.ndarray, records: np.ndarray) -> None:
        """Writes records, made by `empty`.

        Raises:
            OSError: the disk is full, or fails. Some of the records may be written.
        """
        records[_CHECK] = self._checks(numbers, records)
        self._put(numbers, records)

    def erase(self, numbers: np.ndarray) -> None:
        """Writes records of zeros, as if none had been written."""
        self._put(numbers, self.empty(len(numbers)))

    def are_valid(self, numbers: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Returns False for each damaged record."""
        return (records[_CHECK] == self._checks(numbers, records)) | ~self.are_written(records)

    def are_written(self, records: np.ndarray) -> np.ndarray:
        """Returns False for each record that was never written, or erased."""
        return records[_CHECK] != 0

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the numbers and records of the whole file, unchecked."""
        count = max(1, _CHUNK_BYTES // self.record_bytes)
        for first in range(0, self._end_bytes // self.record_bytes, count):
            begin = first * self.record_bytes
            ahead = begin + count * self.record_bytes
            os.posix_fadvise(self._file, ahead, count * self.record_bytes, os.POSIX_FADV_WILLNEED)
            end = min(ahead, self._end_bytes // self.record_bytes * self.record_bytes)
            records = np.frombuffer(self._read(begin, end - begin), self._dtype)
            yield np.arange(first, first + len(records)), records

    def sync(self) -> None:
        """Waits until all records are on disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _put(self, numbers: np.ndarray, records: np.ndarray) -> None:
        if not len(numbers):
            return
        end_bytes = (int(numbers[-1]) + 1) * self.record_bytes
        if end_bytes > self._end_bytes:  # a file with holes, so that each read has its full size
            self._end_bytes = max(int(end_bytes * _GROWTH), _LEAST_GROWTH_BYTES)
            os.ftruncate(self._file, self._end_bytes)
        parts = self._parts(numbers)
        for begin, size in parts:  # a page that is written in part is read before
            if size < _PAGE_BYTES:
                os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_WILLNEED)
        data = records.data.cast("B")
        place = 0
        for begin, size in parts:
            self._write(data[place : place + size], begin)
            place += size

    def _parts(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Returns the byte offset and size of each run of consecutive numbers."""
        is_first = np.ones(len(numbers), np.bool_)
        np.not_equal(np.diff(numbers), 1, out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        sizes = np.diff(firsts, append=len(numbers)) * self.record_bytes
        begins = numbers[firsts] * self.record_bytes
        return list(zip(begins.tolist(), sizes.tolist(), strict=True))

    def _read(self, begin: int, size: int) -> bytes:
        data = os.pread(self._file, size, begin)
        while len(data) < size:
            more = os.pread(self._file, size - len(data), begin + len(data))
            data += more or bytes(size - len(data))  # beyond the end
        return data

    def _write(self, data: memoryview, begin: int) -> None:
        while data:
            count = os.pwrite(self._file, data, begin)
            data, begin = data[count:], begin + count

    def _checks(self, numbers: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Returns checksums, which depend on the place of a record and are never 0.

        Source: Carter and Wegman, Universal classes of hash functions (1979).
        """
        words = np.ascontiguousarray(records).view(np.uint64)
        words = words.reshape(len(records), self.record_bytes // 8)[:, 1:]
        sums = words @ self._weights + numbers.astype(np.uint64) * np.uint64(GOLDEN)
        return mix64(sums) | np.uint64(1)


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
        write_durably(self._folder / _MANIFEST, json.dumps({**fields, "groups": self._groups}))

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
