"""Shared memory through which two processes exchange arrays."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.storage.files import Arrays
from stratagem.resources import available_cores

_ALIGNMENT_BYTES = 64
# One core does not reach the bandwidth of the memory; more than four add little.
_MAX_THREADS = 4
_PIECE_BYTES = 2**24
# Reserved for alignment, and for values of each replica.
_SPARE_PART, _SPARE_BYTES = 64, 2**16


@dataclasses.dataclass(frozen=True)
class ArrayLocation:
    """Location of an array in the shared memory; the offset counts from its start."""

    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Staging:
    """Shared memory that is reused by every checkpoint and freed with its last process.

    It only grows, since allocating memory costs more than copying into it. `descriptor` is another
    process's memory; None creates it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._memory: mmap.mmap | None = None

    def put(self, items: Mapping[str, Arrays], *, begin_bytes: int = 0) -> list[ArrayLocation]:
        """Copies arrays into the memory, overwriting earlier ones, and returns their locations.

        Leaves `begin_bytes` free at the start. Raises OSError without enough memory.
        """
        arrays = [(item, path, array) for item, of in items.items() for path, array in of.items()]
        locations: list[ArrayLocation] = []
        for item, path, array in arrays:
            location = ArrayLocation(item, path, array.shape, str(array.dtype), begin_bytes)
            locations.append(location)
            begin_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._reach(end_bytes(locations))
        views = map(self._view, locations)
        _copy([(view, array) for view, (_, _, array) in zip(views, arrays, strict=True)])
        return locations

    @property
    def size_bytes(self) -> int:
        """Size of the memory in bytes."""
        return os.fstat(self.descriptor).st_size

    def reserve(self, size_bytes: int) -> None:
        """Grows the memory ahead of a `put`; what it adds is mapped, so that copying is fast.

        Leaves room between arrays: growing once more would map all of the memory anew.
        """
        begin_bytes = self.size_bytes
        self._reach(size_bytes + size_bytes // _SPARE_PART + _SPARE_BYTES)
        added = np.ndarray((self.size_bytes,), np.uint8, self._memory)[begin_bytes:]
        for at in range(0, added.size, _PIECE_BYTES):
            np.copyto(added[at : at + _PIECE_BYTES], 0)

    def get(self, locations: Iterable[ArrayLocation]) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Returns arrays by item and path as views, which the next `put` overwrites.

        Items without arrays are omitted.
        """
        locations = list(locations)
        self._reach(end_bytes(locations))
        items: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        for location in locations:
            items.setdefault(location.item, {})[location.path] = self._view(location)
        return items

    def close(self) -> None:
        """Closes the memory; views of it must be released first."""
        os.close(self.descriptor)

    def _view(self, location: ArrayLocation) -> np.ndarray[Any, Any]:
        assert self._memory is not None
        return np.ndarray(
            location.shape, np.dtype(location.dtype), self._memory, location.offset_bytes
        )

    def _reach(self, size_bytes: int) -> None:
        """Grows the memory to at least this size; remapping preserves its contents."""
        size_bytes = max(size_bytes, 1)
        if self._memory is not None and len(self._memory) >= size_bytes:
            return
        current_bytes = os.fstat(self.descriptor).st_size
        if current_bytes < size_bytes:
            _allocate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, max(size_bytes, current_bytes))


def _copy(pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> None:
    """Copies arrays to others, large ones with several threads."""
    num_threads = min(_MAX_THREADS, int(available_cores()))
    if num_threads < 2 or sum(target.nbytes for target, _ in pairs) < 2 * _PIECE_BYTES:
        for target, source in pairs:
            np.copyto(target, source)
        return
    with ThreadPoolExecutor(num_threads, "stratagem-copies") as threads:
        for _ in threads.map(lambda pair: np.copyto(*pair), _pieces(pairs)):
            pass


def _pieces(
    pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    for target, source in pairs:
        if target.nbytes <= _PIECE_BYTES or not source.flags.c_contiguous:
            yield target, source
            continue
        to, of = (array.reshape(-1).view(np.uint8) for array in (target, source))
        for at in range(0, to.size, _PIECE_BYTES):
            yield to[at : at + _PIECE_BYTES], of[at : at + _PIECE_BYTES]


def end_bytes(locations: Iterable[ArrayLocation]) -> int:
    """Returns the end of the last array in the memory."""
    return max((location.offset_bytes + location.size_bytes for location in locations), default=0)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocates the memory now: writing to a sparse file on a full disk would raise SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:
        os.ftruncate(descriptor, size_bytes)


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("stratagem")
    with tempfile.TemporaryFile() as file:  # without a name, like the memory file
        return os.dup(file.fileno())


# Snapshots of training state in shared memory that survives the process.

# A mark, then offset, size and checksum of the description. Written last, as the commit.
_HEAD = struct.Struct("<8sQQI")
_MARK = b"stratgm1"
_HEAD_BYTES = 64
_NUM_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot of one step.

    `items` holds arrays by item and path. They alias shared memory that `put` overwrites when
    called twice.
    """

    number: int
    items: dict[str, Arrays]
    notes: dict[str, Any]


class MemorySlots:
    """The last two snapshots of one process, in files on an in-memory file system.

    One is complete whenever the process is killed. They are lost with the machine. `folder` is in
    memory, such as in /dev/shm; `name` is the process's, the same after a restart.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        self._slots = [_SnapshotFile(directory / f"{name}.{index}") for index in range(_NUM_SLOTS)]
        self._next = 0
        self.get()  # so that the first `put` spares the newest

    def put(self, number: int, items: Mapping[str, Arrays], notes: Mapping[str, Any]) -> None:
        """Overwrites the older snapshot."""
        self._slots[self._next].put(number, items, notes)
        self._next = (self._next + 1) % _NUM_SLOTS

    def get(self) -> list[Snapshot]:
        """Returns the complete snapshots, newest first; the next `put` spares the first."""
        found = {
            index: snapshot
            for index, slot in enumerate(self._slots)
            if (snapshot := slot.get()) is not None
        }
        order = sorted(found, key=lambda index: -found[index].number)
        if order:
            self._next = (order[0] + 1) % _NUM_SLOTS
        return [found[index] for index in order]

    def forget_after(self, number: int | None) -> None:
        """Deletes snapshots of steps after `number`; None deletes all."""
        for slot in self._slots:
            snapshot = slot.get()
            if snapshot is not None and (number is None or snapshot.number > number):
                slot.clear()
        self.get()


class _SnapshotFile:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._staging = Staging(self._file)
        self._layout: list[ArrayLocation] = []
        self._layout_text = ""

    def put(self, number: int, items: Mapping[str, Arrays], notes: Mapping[str, Any]) -> None:
        self.clear()
        locations = self._staging.put(items, begin_bytes=_HEAD_BYTES)
        if locations != self._layout:  # usually the same in each step
            self._layout = locations
            self._layout_text = json.dumps([dataclasses.astuple(one) for one in locations])
        text = f'{{"number": {number:d}, "notes": {json.dumps(notes)}, '
        text += f'"names": {json.dumps(list(items))}, "placed": {self._layout_text}}}'
        encoded = text.encode()
        begin_bytes = max(end_bytes(locations), _HEAD_BYTES)
        os.pwrite(self._file, encoded, begin_bytes)
        os.pwrite(self._file, _HEAD.pack(_MARK, begin_bytes, len(encoded), zlib.crc32(encoded)), 0)

    def clear(self) -> None:
        os.pwrite(self._file, bytes(_HEAD_BYTES), 0)

    def get(self) -> Snapshot | None:
        head = os.pread(self._file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        mark, begin_bytes, size_bytes, checksum = _HEAD.unpack(head)
        encoded = os.pread(self._file, size_bytes, begin_bytes) if mark == _MARK else b""
        if not encoded or zlib.crc32(encoded) != checksum:
            return None
        description = json.loads(encoded)
        locations = [
            ArrayLocation(item, path, tuple(shape), dtype, offset_bytes)
            for item, path, shape, dtype, offset_bytes in description["placed"]
        ]
        found = self._staging.get(locations)
        return Snapshot(
            description["number"],
            {name: found.get(name, {}) for name in description["names"]},
            description["notes"],
        )

    def __del__(self) -> None:
        os.close(self._file)
