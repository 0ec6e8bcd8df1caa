"""Large arrays, read from Orbax's files without Orbax.

Orbax and TensorStore read a chunk to memory of their own, copy it, and hold both meanwhile; memory
is slower to get than the disk is to read. An array that is one uncompressed chunk is contiguous in
its file: here it is read to its place, and verified while it is in the processor's cache. The
checksum of the manifest decides whether the bytes are the array; what is not found or differs is
left to Orbax.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.optional_libraries import load

__all__ = ["Receiver", "read_large_arrays"]

Receiver = Callable[[np.ndarray[Any, Any]], Any]
"""Gets a verified array; returns what the reader returns in its place."""

_Entries = Mapping[str, Sequence[Mapping[str, Any]]]

# Smaller ones are left to Orbax, which reads many of them at once.
_MIN_BYTES = 2**20
# Read and verified at once: fits the cache of a core.
_PIECE_BYTES = 2**19
_NUM_READERS = 4
# A shard of one chunk ends with an index: offset and size of the chunk, and a checksum.
_INDEX_BYTES = 20


@dataclasses.dataclass(frozen=True)
class _LargeArray:
    """An array that may be contiguous in a file."""

    item: str
    entry: Mapping[str, Any]
    file: Path
    offset_bytes: int


def read_large_arrays(
    folder: Path, entries: _Entries, receive: Receiver | None
) -> dict[str, dict[str, Any]]:
    """Returns large arrays by item and path, each as `receive` returned it.

    Omits what Orbax has to read: small, compressed, and damaged arrays. None verifies the arrays
    without keeping them, and returns None in their place.
    """
    found = sorted(_located(folder, entries), key=lambda one: -_size_bytes(one.entry))
    read: dict[str, dict[str, Any]] = {}
    if not found:
        return read
    with ThreadPoolExecutor(_NUM_READERS, "stratagem-readers") as threads:
        results = threads.map(lambda one: _read(one, receive), found)
        for one, (is_read, value) in zip(found, results, strict=True):
            if is_read:
                read.setdefault(one.item, {})[one.entry["path"]] = value
    return read


def _read(one: _LargeArray, receive: Receiver | None) -> tuple[bool, Any]:
    array = None
    if receive is not None:
        array = np.empty(one.entry["shape"], np.dtype(one.entry["dtype"]))
    target = None if array is None else array.reshape(-1).view(np.uint8)
    try:
        checksum = _read_bytes(one, target)
    except (OSError, EOFError):
        return False, None
    if checksum != one.entry["crc32"]:
        return False, None
    return True, None if receive is None else receive(array)


def _read_bytes(one: _LargeArray, target: np.ndarray[Any, Any] | None) -> int:
    """Reads the bytes of an array, unless None to a target; returns their checksum."""
    size_bytes, checksum, at = _size_bytes(one.entry), 0, 0
    scratch = memoryview(bytearray(0 if target is not None else _PIECE_BYTES))
    with open(one.file, "rb", buffering=0) as file:
        file.seek(one.offset_bytes)
        while at < size_bytes:
            length = min(_PIECE_BYTES, size_bytes - at)
            piece = scratch[:length] if target is None else target[at : at + length].data
            if not (count := file.readinto(piece)):
                raise EOFError(f"{one.file} ends early.")
            checksum = zlib.crc32(piece[:count], checksum)
            at += count
    return checksum


def _located(folder: Path, entries: _Entries) -> Iterator[_LargeArray]:
    for item, some in entries.items():
        large = [entry for entry in some if _size_bytes(entry) >= _MIN_BYTES]
        values = _values(folder / item) if large else {}
        for entry in large:
            name = entry["path"].replace("/", ".")
            location = values.get(f"{name}/c" + "/0" * len(entry["shape"]))
            if location is None:
                continue
            file, offset_bytes, length_bytes = location
            if length_bytes - _size_bytes(entry) in (0, _INDEX_BYTES):
                yield _LargeArray(item, entry, file, offset_bytes)


def _values(item: Path) -> dict[str, tuple[Path, int, int]]:
    """Returns file, offset and length of each value of an OCDBT database; empty if unreadable."""
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


def _location(item: Path, value: str) -> tuple[Path, int, int]:
    """Parses value:FOLDER:FILE:OFFSET:LENGTH."""
    _, folder, file, offset, length = value.split(":")
    return item / folder / file, int(offset), int(length)


def _size_bytes(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
