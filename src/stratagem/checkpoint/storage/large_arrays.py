"""Large arrays, read from Orbax's files without Orbax.

Orbax and TensorStore read a chunk to memory of their own, then copy it, and fresh memory costs more
time than the disk. An array that is one uncompressed chunk is contiguous in its file. Here it is
read once, and verified while it is in the processor's cache. The checksum of the manifest decides;
arrays that are not found, or that differ, are left to Orbax.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from stratagem.environment import load
from stratagem.resources import available_cores

_Array = np.ndarray[Any, Any]

Receiver = Callable[[_Array], Any]
"""Copies a verified array, whose memory is used again; the reader returns the copy in its place."""

_Entries = Mapping[str, Sequence[Mapping[str, Any]]]

# Smaller ones are left to Orbax, which reads many of them at once.
_MIN_BYTES = 2**20
# Read and verified at once: fits the cache of a core.
_PIECE_BYTES = 2**19
_MAX_READERS = 4
INDEX_BYTES = 20
"""A shard of one chunk ends with an index: offset and size of the chunk, and a checksum."""


@dataclasses.dataclass(frozen=True)
class Location:
    """Place of a value in a file."""

    file: Path
    offset_bytes: int
    length_bytes: int


@dataclasses.dataclass(frozen=True)
class _LargeArray:
    """An array that may be contiguous in a file."""

    item: str
    entry: Mapping[str, Any]
    location: Location


def read_large_arrays(
    folder: Path, entries: _Entries, receive: Receiver | None = None
) -> dict[str, dict[str, Any]]:
    """Returns large arrays by item and path, or what `receive` made of them.

    Omits what Orbax has to read: small, compressed, and damaged arrays.
    """
    found = list(_located(folder, entries))
    scratch = SimpleQueue[_Array]()
    for _ in range(num_readers() if receive and found else 0):
        scratch.put(np.empty(max(size_bytes_of(one.entry) for one in found), np.uint8))

    def read(one: _LargeArray) -> Any:
        size_bytes = size_bytes_of(one.entry)
        memory = np.empty(size_bytes, np.uint8) if receive is None else scratch.get()
        try:
            array = memory[:size_bytes].view(one.entry["dtype"]).reshape(one.entry["shape"])
            if not _is_read(one, memory[:size_bytes]):
                return None
            return array if receive is None else receive(array)
        finally:
            if receive is not None:
                scratch.put(memory)

    return _by_path(found, read)


def verify_large_arrays(folder: Path, entries: _Entries) -> dict[str, dict[str, bool]]:
    """Returns True by item and path for large arrays that are undamaged; omits others."""
    return _by_path(list(_located(folder, entries)), lambda one: _is_read(one, None) or None)


def _by_path(
    found: list[_LargeArray], work: Callable[[_LargeArray], Any]
) -> dict[str, dict[str, Any]]:
    """Returns what work returns by item and path, except None; several threads work."""
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(num_readers(), "stratagem-readers") as threads:
        for one, result in zip(found, threads.map(work, found), strict=True):
            if result is not None:
                results.setdefault(one.item, {})[one.entry["path"]] = result
    return results


def num_readers() -> int:
    """Returns at least two: one waits for the disk while another verifies."""
    return min(_MAX_READERS, max(2, int(available_cores())))


def _is_read(one: _LargeArray, target: _Array | None) -> bool:
    """Reads an array to its target, if it has one; True if it is undamaged."""
    try:
        size_bytes = size_bytes_of(one.entry)
        return read_bytes(one.location, size_bytes, target) == one.entry["crc32"]
    except OSError:
        return False


def read_bytes(location: Location, size_bytes: int, target: _Array | None) -> int:
    """Reads so many bytes, to a target unless it is None; returns their checksum."""
    checksum, at = 0, 0
    scratch = memoryview(bytearray(0 if target is not None else _PIECE_BYTES))
    with open(location.file, "rb", buffering=0) as file:
        file.seek(location.offset_bytes)
        while at < size_bytes:
            length = min(_PIECE_BYTES, size_bytes - at)
            piece = scratch[:length] if target is None else target[at : at + length].data
            if not (count := file.readinto(piece)):
                break  # the file ends early, and the checksum differs
            checksum = zlib.crc32(piece[:count], checksum)
            at += count
    return checksum


def _located(folder: Path, entries: _Entries) -> Iterator[_LargeArray]:
    for item, some in entries.items():
        large = [entry for entry in some if size_bytes_of(entry) >= _MIN_BYTES]
        values = locations_of(folder / item) if large else {}
        for entry in large:
            name = entry["path"].replace("/", ".")
            location = values.get(f"{name}/c" + "/0" * len(entry["shape"]))
            if location is None:
                continue
            if location.length_bytes - size_bytes_of(entry) in (0, INDEX_BYTES):
                yield _LargeArray(item, entry, location)


def locations_of(item: Path) -> dict[str, Location]:
    """Returns the place of each value of an OCDBT database by key; empty if it is unreadable."""
    tensorstore = load("tensorstore", needed_by="A checkpoint", install="'stratagem[checkpoint]'")
    try:
        base = tensorstore.KvStore.open({"driver": "file", "path": f"{item}/"}).result()
        database = tensorstore.ocdbt.dump(base).result()
        version = database["versions"][-1]
        if version["root_height"] != 0:  # hundreds of thousands of arrays
            return {}
        tree = tensorstore.ocdbt.dump(base, version["root"]["location"]).result()
        return {
            entry["key"].decode(): _location(item, entry["indirect_value"])
            for entry in tree["entries"]
            if "indirect_value" in entry
        }
    except (ValueError, KeyError, IndexError, TypeError, OSError):
        return {}


def _location(item: Path, value: str) -> Location:
    """Parses value:FOLDER:FILE:OFFSET:LENGTH."""
    _, folder, file, offset, length = value.split(":")
    return Location(item / folder / file, int(offset), int(length))


def size_bytes_of(entry: Mapping[str, Any]) -> int:
    """Returns the size of an array from its manifest entry."""
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
