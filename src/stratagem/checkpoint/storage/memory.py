"""Snapshots of training state in shared memory that survives the process."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.checkpoint.storage.files import Arrays
from stratagem.checkpoint.storage.staging import ArrayLocation, Staging, end_bytes

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
