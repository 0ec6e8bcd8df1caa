"""Snapshots in memory that outlives its process: what a step costs, and what a kill cannot harm."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.storage.files import Arrays
from stratagem.storage.staging import Placed, Staging, end_bytes

__all__ = ["MemorySlots", "Snapshot"]

# A mark, and place, size and checksum of the description. It is written last.
_HEAD = struct.Struct("<8sQQI")
_MARK = b"stratgm1"
_HEAD_BYTES = 64
_NUM_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What was kept.

    Args:
        number: of the step.
        items: arrays by path, by item, where they lie: the next but one snapshot goes over them.
        notes: what else was kept.
    """

    number: int
    items: dict[str, Arrays]
    notes: dict[str, Any]


class MemorySlots:
    """The last two snapshots of one process, in files of a folder in memory.

    One is whole whenever the process is killed. They are no protection from a machine that stops.

    Args:
        folder: one of a file system in memory, such as a folder in /dev/shm.
        name: of the process, one that the next process in its place has, too.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        self._slots = [_Slot(directory / f"{name}.{index}") for index in range(_NUM_SLOTS)]
        self._next = 0
        self.get()  # so that the first one spares the newest

    def put(self, number: int, items: Mapping[str, Arrays], notes: Mapping[str, Any]) -> None:
        """Keeps a snapshot in the place of the older one.

        Args:
            number: of the step.
            items: arrays by path, by item.
            notes: what else to keep, as JSON.
        """
        self._slots[self._next].put(number, items, notes)
        self._next = (self._next + 1) % _NUM_SLOTS

    def get(self) -> list[Snapshot]:
        """Returns the snapshots that are whole, the newest first; the next one spares the first."""
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
        """Forgets snapshots of later steps than that from which training goes on.

        Args:
            number: of that step; None forgets all.
        """
        for slot in self._slots:
            snapshot = slot.get()
            if snapshot is not None and (number is None or snapshot.number > number):
                slot.clear()
        self.get()


class _Slot:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._staging = Staging(self._file)
        self._layout: list[Placed] = []
        self._layout_text = ""

    def put(self, number: int, items: Mapping[str, Arrays], notes: Mapping[str, Any]) -> None:
        self.clear()
        placed = self._staging.put(items, begin_bytes=_HEAD_BYTES)
        if placed != self._layout:  # the same in each step
            self._layout = placed
            self._layout_text = json.dumps([dataclasses.astuple(one) for one in placed])
        text = f'{{"number": {number:d}, "notes": {json.dumps(notes)}, '
        text += f'"names": {json.dumps(list(items))}, "placed": {self._layout_text}}}'
        told = text.encode()
        begin_bytes = max(end_bytes(placed), _HEAD_BYTES)
        os.pwrite(self._file, told, begin_bytes)
        os.pwrite(self._file, _HEAD.pack(_MARK, begin_bytes, len(told), zlib.crc32(told)), 0)

    def clear(self) -> None:
        os.pwrite(self._file, bytes(_HEAD_BYTES), 0)

    def get(self) -> Snapshot | None:
        head = os.pread(self._file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        mark, begin_bytes, size_bytes, checksum = _HEAD.unpack(head)
        told = os.pread(self._file, size_bytes, begin_bytes) if mark == _MARK else b""
        if not told or zlib.crc32(told) != checksum:
            return None
        known = json.loads(told)
        placed = [
            Placed(item, path, tuple(shape), dtype, offset_bytes)
            for item, path, shape, dtype, offset_bytes in known["placed"]
        ]
        found = self._staging.get(placed)
        return Snapshot(
            known["number"], {name: found.get(name, {}) for name in known["names"]}, known["notes"]
        )

    def __del__(self) -> None:
        os.close(self._file)
