"""Files of saved keyed tables: records with checksums, and rows that can be mapped into memory.

A file begins with a line that names the format. The first record describes the table, the last one
its state besides rows, and those between have slots with their keys, counts and rows. A later
record replaces an earlier one's slots. Rows are the last frame of a record, at an offset that is a
multiple of their size, so that a mapped file is an array of rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from stratagem.errors import DataLossError, NotFoundError, explain
from stratagem.group.transport.journal import (
    frames_in,
    last_frame_offset,
    record_at,
    sync,
    sync_folder,
    write_all,
    write_record,
)
from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.parameter_server.server.tables.key_slots import SavedKeys, SlotOrder
from stratagem.resources import Closing

_LINE = b"stratagem table 1\n"
_HEAD, _ROWS, _END = "head", "rows", "end"
_INVALID = (LookupError, TypeError, ValueError, StopIteration, ConnectionError)


@dataclasses.dataclass(frozen=True)
class TableHead:
    """Identity of a file.

    Args:
        save: identity of the save that wrote it.
        base: save whose file the changes continue; None for a file with all rows.
        table: name of the table.
        part: number of the shard among those of the table.
        row_shape: shape of a row.
        dtype: dtype name of rows.
    """

    save: str
    base: str | None
    table: str
    part: int
    row_shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SavedRows:
    """Slots of one record.

    Args:
        rows: slots of rows, and freed ones.
        candidates: slots of keys that have no row yet.
        value: rows.
        slots: rows of the optimizer slots, by name.
        offset: offset of the rows in the file.
    """

    rows: SavedKeys
    candidates: SavedKeys
    value: np.ndarray
    slots: Mapping[str, np.ndarray]
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class TableEnd:
    """State of a table when it was saved, besides rows.

    Args:
        version: version of the server, with which ages compare.
        rows: choice of the next slots of rows.
        candidates: choice of the next slots of keys that have no row yet.
        counters: counters of the table.
        initials: initial values of the optimizer slots, by name.
    """

    version: int
    rows: SlotOrder
    candidates: SlotOrder
    counters: Mapping[str, int]
    initials: Mapping[str, float]


class TableFileWriter(Closing):
    """Writes a file that has its name only when it is complete and on disk.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, head: TableHead) -> None:
        self._path, self._head = path, head
        self._new = path.with_name(f"{path.name}.new")
        self._file: IO[bytes] = self._new.open("wb", buffering=0)
        self.num_rows = 0
        try:
            write_all(self._file, _LINE)
            write_record(self._file, pack(Message(_HEAD, dataclasses.asdict(head))))
        except BaseException:
            self.close()
            raise

    def add(self, part: SavedRows) -> None:
        """Adds a record."""
        if not any(len(array) for one in (part.rows, part.candidates) for array in one.arrays):
            return
        value = np.ascontiguousarray(part.value)
        arrays = [*_narrow(part.rows).arrays, *_narrow(part.candidates).arrays]
        message = Message(_ROWS, {"slots": list(part.slots)}, [*arrays, *part.slots.values()])
        frames = pack(message)
        sizes = [memoryview(frame).nbytes for frame in frames]
        offset = self._file.tell() + last_frame_offset([*sizes, 0])
        padding = -offset % max(1, self._head.row_bytes)
        rows = value.reshape(-1).view(np.uint8)
        write_record(self._file, [*frames, bytes(padding), rows])
        self.num_rows += len(value)

    def end(self, end: TableEnd) -> int:
        """Adds the last record, gives the file its name, and returns its size in bytes."""
        orders = {"rows": end.rows, "candidates": end.candidates}
        fields: dict[str, Any] = {
            "version": end.version,
            "counters": dict(end.counters),
            "initials": dict(end.initials),
        }
        for name, order in orders.items():
            fields[name] = [order.num_slots, order.hand, order.swept]
        write_record(self._file, pack(Message(_END, fields, [one.free for one in orders.values()])))
        sync(self._file)
        size_bytes = self._file.tell()
        self._file.close()
        self._new.replace(self._path)
        sync_folder(self._path.parent)
        return size_bytes

    def close(self) -> None:
        """Removes the file unless it is complete."""
        self._file.close()
        self._new.unlink(missing_ok=True)


class TableFile(Closing):
    """Reads a file, whose checksums are verified first.

    `head` and `end` are its first and last records. Rows are read in place.

    Raises:
        DataLossError: the file is missing, damaged or incomplete.
    """

    def __init__(self, path: Path, size_bytes: int | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                found_bytes = os.fstat(file.fileno()).st_size
                if size_bytes is not None and found_bytes != size_bytes:
                    raise damaged(path, f"it has {found_bytes} bytes and not {size_bytes}")
                if not found_bytes:
                    raise damaged(path, "it is empty")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        self._view = memoryview(self.map)
        try:
            self._places = self._verified()
            first, last = self._message(0)[0], self._message(-1)[0]
            self.head = _head_of(first)
            self.end = _end_of(last)
        except _INVALID as error:
            raise damaged(
                path, f"a record has invalid contents ({type(error).__name__})"
            ) from error

    def parts(self, *, is_reversed: bool = False) -> Iterator[SavedRows]:
        """Yields the records with rows, in order or the last one first."""
        numbers = range(1, len(self._places) - 1)
        for number in reversed(numbers) if is_reversed else numbers:
            self.map.madvise(mmap.MADV_DONTNEED)  # drops pages that were read
            try:
                yield self._part(number)
            except _INVALID as error:
                how = f"a record has invalid contents ({type(error).__name__})"
                raise damaged(self.path, how) from error

    def close(self) -> None:
        """Drops the file. Arrays that were read keep their memory."""
        self._view = memoryview(b"")

    def _verified(self) -> list[tuple[int, int]]:
        if bytes(self._view[: len(_LINE)]) != _LINE:
            raise damaged(self.path, "it is not a saved table of this format")
        places: list[tuple[int, int]] = []
        place, size_bytes = len(_LINE), len(self._view)
        while place < size_bytes:
            record = record_at(self._bytes, place, size_bytes)
            if record is None:
                raise damaged(self.path, f"the record at byte {place} fails its checksum")
            places.append(record)
            place = record[1]
        self.map.madvise(mmap.MADV_DONTNEED)
        return places

    def _bytes(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def _message(self, number: int, num_own: int = 0) -> tuple[Message, list[memoryview]]:
        """Returns the message of a record, and its last `num_own` frames, which are no arrays."""
        begin, end = self._places[number]
        frames = frames_in(self._view[begin:end])
        count = len(frames) - num_own
        return unpack(frames[:count]), frames[count:]

    def _part(self, number: int) -> SavedRows:
        message, (_, rows) = self._message(number, 2)
        arrays = iter(message.arrays)
        keys, candidates = SavedKeys.from_arrays(arrays), SavedKeys.from_arrays(arrays)
        value = np.frombuffer(rows, np.dtype(self.head.dtype))
        value = value.reshape(len(keys.slots), *self.head.row_shape)
        slots = {name: next(arrays) for name in message.fields["slots"]}
        return SavedRows(keys, candidates, value, slots, self._places[number][1] - len(rows))


def damaged(path: Path, how: str) -> DataLossError:
    """Returns the error of a saved table that cannot be read."""
    return DataLossError(
        explain(
            f"The saved table {path} cannot be read: {how}.",
            expected="all files of the version and of those that it continues, unchanged.",
            fix="restore another version, or save all rows again without since=.",
        )
    )


def _narrow(keys: SavedKeys) -> SavedKeys:
    """Returns slots with half of the bytes."""
    return dataclasses.replace(
        keys, slots=keys.slots.astype(np.int32), freed=keys.freed.astype(np.int32)
    )


def _head_of(message: Message) -> TableHead:
    if message.kind != _HEAD:
        raise ValueError(message.kind)
    fields: dict[str, Any] = {**message.fields}
    fields["row_shape"] = tuple(fields["row_shape"])
    return TableHead(**fields)


def _end_of(message: Message) -> TableEnd:
    if message.kind != _END:
        raise ValueError(message.kind)
    fields = message.fields
    rows, candidates = message.arrays
    return TableEnd(
        fields["version"],
        _order(fields["rows"], rows),
        _order(fields["candidates"], candidates),
        fields["counters"],
        fields["initials"],
    )


def _order(numbers: Sequence[Any], free: np.ndarray) -> SlotOrder:
    num_slots, hand, swept = numbers
    return SlotOrder(num_slots, hand, swept, free)


# Versions of saved keyed tables in a folder: their manifests, and the published one.
#
# A version is a folder of files and a manifest, which is written last: without it the version does
# not exist. `LATEST` has the number of the published version. Both are replaced atomically.


_FORMAT = 1
_MANIFEST, _LATEST = "manifest.json", "LATEST"
_NUMBER = re.compile(r"\d{8}")


class TableVersions:
    """Versions in a folder, by number from 1 on. Other processes may add some."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.fspath(folder)).absolute()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the complete versions, in order."""
        return [one for one in self._started() if (self.path(one) / _MANIFEST).is_file()]

    @property
    def latest(self) -> int | None:
        """Number of the published version; None if none was published."""
        try:
            return int((self.folder / _LATEST).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise damaged(self.folder / _LATEST, "it is no number") from error

    def path(self, number: int) -> Path:
        """Returns the folder of a version."""
        return self.folder / f"{number:08d}"

    def chosen(self, version: int | None) -> int:
        """Returns a version: the given one, else the published one, else the newest.

        Raises:
            NotFoundError: there is no such version.
        """
        numbers = self.numbers
        number = self.latest if version is None else version
        if number is None and numbers:
            return numbers[-1]
        if number in numbers:
            return number
        which = "no versions of tables" if number is None else f"no version {number} of tables"
        raise NotFoundError(
            explain(
                f"{self.folder} has {which}.",
                expected=f"one of its versions: {numbers}." if numbers else "a folder with some.",
                fix="pass the folder that sg.embedding.save wrote, and a number that it returned.",
            )
        )

    def begin(self) -> int:
        """Makes the folder of a new version, removes unfinished ones, and returns its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started, complete = self._started(), {*self.numbers}
        for number in started:
            if number not in complete:
                self.remove(number)
        number = started[-1] + 1 if started else 1
        self.path(number).mkdir()
        return number

    def remove(self, number: int) -> None:
        """Removes a version: first its manifest."""
        (self.path(number) / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path(number), ignore_errors=True)

    def manifest(self, number: int) -> dict[str, Any]:
        """Returns the manifest of a version.

        Raises:
            DataLossError: it is missing or damaged.
        """
        path = self.path(number) / _MANIFEST
        try:
            saved = json.loads(path.read_bytes())
            crc32 = saved.pop("crc32")
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(path, "it is no manifest") from error
        if crc32 != _checksum(saved):
            raise damaged(path, "its checksum is wrong")
        if (saved["format"], saved["version"]) != (_FORMAT, number):
            raise damaged(path, f"it is version {saved['version']} of format {saved['format']}")
        return saved

    def write_manifest(self, number: int, fields: Mapping[str, Any]) -> None:
        """Makes a version complete, or replaces its manifest."""
        saved = {**fields, "format": _FORMAT, "version": number}
        text = json.dumps({**saved, "crc32": _checksum(saved)}, indent=1)
        write_durably(self.path(number) / _MANIFEST, text)
        sync_folder(self.folder)

    def publish(self, number: int) -> None:
        """Makes a version the published one."""
        write_durably(self.folder / _LATEST, f"{number}\n")

    def chain(self, number: int, table: str, part: int) -> dict[str, Any]:
        """Returns the files of a part of a table, as `TableChain` takes them.

        Raises:
            DataLossError: a version that this one continues is missing, damaged or another one.
        """
        files: list[tuple[str, int, str]] = []
        manifest = self.manifest(number)
        own = manifest["tables"][table]["parts"][part]
        buckets = own["buckets"]
        while True:
            files.append((own["file"], own["size_bytes"], manifest["save"]))
            if own["base"] is None:
                return {"files": files, "buckets": buckets}
            number = manifest["base"]
            manifest = self.manifest(number)
            if manifest["save"] != own["base"]:
                how = "the next version does not continue this one"
                raise damaged(self.path(number) / _MANIFEST, how)
            own = manifest["tables"][table]["parts"][part]

    def _started(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = [one.name for one in self.folder.iterdir() if _NUMBER.fullmatch(one.name)]
        return sorted(map(int, names))


def file_name(number: int, table: str, part: int) -> str:
    """Returns the name of a file, relative to the folder of all versions."""
    return f"{number:08d}/{quote(table, safe='')}-{part}.rows"


def write_durably(path: Path, text: str) -> None:
    """Writes a file that is complete under its name, and on disk."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb", buffering=0) as file:
        write_all(file, text.encode())
        sync(file)
    new.replace(path)
    sync_folder(path.parent)


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# Versions that belong to a series of checkpoints: which one to continue, and which to remove.

# Field of a version's manifest: name of the checkpoint that it belongs to.
CHECKPOINT = "checkpoint"


def base_of_next(versions: TableVersions, last: str | None, full_every: int) -> int | None:
    """Returns the version that the next one continues; None if the next one is to have all rows.

    Args:
        versions: versions of the series.
        last: the last checkpoint of the series; None if there is none.
        full_every: at most so many versions in a row have all rows once. There are fewer if the
            changes have become larger than the rows: then all rows are the smaller save.
    """
    changed_bytes = 0
    try:
        base = number = _version_of(versions, last)
        for _ in range(full_every - 1):
            if number is None:
                return None
            manifest = versions.manifest(number)
            parts = _parts(manifest)
            if not all(_is_there(versions, part) for part in parts):
                return None
            if not _has_changes(manifest):
                return base if changed_bytes <= _size_bytes(parts) else None
            changed_bytes += _size_bytes(parts)
            number = manifest["base"]
    except DataLossError:
        return None
    return None


def remove_unneeded(
    versions: TableVersions, is_kept: Callable[[int, Mapping[str, Any]], bool]
) -> None:
    """Removes the versions that are not kept, by number and manifest, and that no such one needs.

    Versions after the last one that is kept stay: their checkpoints may be about to be written. If
    a version is damaged, none is removed.
    """
    try:
        manifests = {number: versions.manifest(number) for number in versions.numbers}
    except DataLossError:
        return
    kept = [one for one, manifest in manifests.items() if is_kept(one, manifest)]
    needed: set[int] = set()
    for one in kept:
        number: int | None = one
        while number in manifests and number not in needed:
            needed.add(number)
            number = manifests[number]["base"] if _has_changes(manifests[number]) else None
    for one in reversed(list(manifests)):  # first those that continue others
        if one not in needed and one < max(kept, default=0):
            versions.remove(one)


def _version_of(versions: TableVersions, checkpoint: str | None) -> int | None:
    """Returns the newest version of a checkpoint."""
    for number in reversed(versions.numbers if checkpoint else []):
        if versions.manifest(number).get(CHECKPOINT) == checkpoint:
            return number
    return None


def _parts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for table in manifest["tables"].values() for part in table["parts"]]


def _has_changes(manifest: dict[str, Any]) -> bool:
    """Returns True if a version needs another one."""
    return any(part["base"] is not None for part in _parts(manifest))


def _size_bytes(parts: list[dict[str, Any]]) -> int:
    return sum(part["size_bytes"] for part in parts)


def _is_there(versions: TableVersions, part: dict[str, Any]) -> bool:
    path = versions.folder / part["file"]
    return path.is_file() and path.stat().st_size == part["size_bytes"]
