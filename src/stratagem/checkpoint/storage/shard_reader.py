"""Parts of saved arrays, read without the rest: each process reads what its devices need.

A chunk, that is a saved shard or an array that was saved whole, is the least that is read, because
its checksum is that of all its bytes.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.storage.shards import (
    INDEX_BYTES,
    Location,
    Receiver,
    locations_of,
    num_readers,
    open_database,
    read_bytes,
    shard_key,
    size_bytes_of,
)
from stratagem.errors import DataLossError, explain, invalid
from stratagem.resources import available_cores

# Checkpoint manifest: contents of a checkpoint, with a checksum of each array.

FORMAT = 1
SHARDED_FORMAT = 2
"""The format with arrays that are saved as shards, with a checksum each."""


def describe_items(
    items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Returns path, shape, dtype and checksum of each array of each item, in order."""
    arrays = [array for item in items.values() for array in item.values()]
    with ThreadPoolExecutor(max(1, int(available_cores())), "stratagem-checksums") as threads:
        checksums = threads.map(_checksum, arrays)
        return {
            name: [
                {
                    "path": path,
                    "shape": list(array.shape),
                    "dtype": str(array.dtype),
                    "crc32": next(checksums),
                }
                for path, array in item.items()
            ]
            for name, item in items.items()
        }


def check_array(entry: Mapping[str, Any], array: np.ndarray[Any, Any], where: str) -> None:
    """Raises DataLossError if an array differs from its manifest entry."""
    is_same = (
        list(array.shape) == entry["shape"]
        and str(array.dtype) == entry["dtype"]
        and _checksum(array) == entry["crc32"]
    )
    if not is_same:
        raise damage_error(where, f"the array {entry['path']} differs from the saved one")


def is_sharded_entry(entry: Mapping[str, Any]) -> bool:
    """True for the entry of an array that is saved as shards."""
    return "shard_shape" in entry


def add_checksum(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest with its format version and a checksum of its text."""
    entries = (entry for item in manifest.get("items", {}).values() for entry in item)
    is_sharded = any(map(is_sharded_entry, entries))
    manifest = {**manifest, "format": SHARDED_FORMAT if is_sharded else FORMAT}
    return {**manifest, "crc32": _text_checksum(manifest)}


def verified_manifest(manifest: object, where: str) -> dict[str, Any]:
    """Returns the manifest without its checksum.

    Raises DataLossError if the checksum differs, and ValueError for a foreign or later format.
    """
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise invalid(
            f"{where} was not written by sg.train.Checkpoint.",
            expected="a checkpoint with Stratagem's manifest.",
            fix="load Keras files with model.load_weights or keras.saving.load_model.",
        )
    if manifest["format"] not in (FORMAT, SHARDED_FORMAT):
        raise invalid(
            f"{where} has format {manifest['format']}.",
            expected=f"format {FORMAT} or {SHARDED_FORMAT}, which this version of Stratagem reads.",
            fix="read it with the Stratagem version that wrote it, or a later one.",
        )
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    if _text_checksum(rest) != manifest.get("crc32"):
        raise damage_error(where, "its manifest has a wrong checksum")
    return rest


def damage_error(where: str, how: str) -> DataLossError:
    """Returns the error for a damaged checkpoint."""
    return DataLossError(
        explain(
            f"The checkpoint {where} is damaged: {how}.",
            expected="unchanged files.",
            fix="restore an earlier checkpoint: CheckpointManager.checkpoints lists them, and "
            "restore_or_initialize(skip_damaged=True) restores the newest undamaged one.",
            code="SG702",
        )
    )


def _checksum(array: np.ndarray[Any, Any]) -> int:
    contiguous = np.ascontiguousarray(array)
    return zlib.crc32(contiguous.reshape(-1).view(np.uint8).data) if array.size else 0


def _text_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


Region = tuple[slice, ...]
"""Part of an array: a slice with a start and an end for each axis."""

_Entries = Mapping[str, Sequence[Mapping[str, Any]]]
_Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    key: str
    region: Region
    crc32: int


class ShardReader:
    """Reads and verifies parts of the arrays of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._items: dict[str, dict[str, Location]] = {}
        self._databases: dict[str, Any] = {}

    def can_read(self, item: str, entry: Mapping[str, Any]) -> bool:
        """True for an array whose parts can be read; Orbax reads the others whole."""
        if is_sharded_entry(entry):
            return True
        (chunk,) = _chunks(entry)
        location = self._locations(item).get(chunk.key)
        size_bytes = size_bytes_of(entry)
        return location is not None and location.length_bytes - size_bytes in (0, INDEX_BYTES)

    def read(
        self, item: str, entry: Mapping[str, Any], regions: Sequence[Region] | None = None
    ) -> list[_Array]:
        """Returns the regions of an array, or all of it; raises DataLossError if it is damaged."""
        dtype = np.dtype(entry["dtype"])
        if regions is None:
            regions = [tuple(slice(0, size) for size in entry["shape"])]
        arrays = [np.empty([one.stop - one.start for one in region], dtype) for region in regions]

        def read(chunk: _Chunk) -> None:
            targets = [
                (array, region, common)
                for array, region in zip(arrays, regions, strict=True)
                if (common := _overlap(chunk.region, region)) is not None
            ]
            self._read_chunk(item, entry, chunk, targets)

        chunks = [
            chunk
            for chunk in _chunks(entry)
            if any(_overlap(chunk.region, region) is not None for region in regions)
        ]
        with ThreadPoolExecutor(num_readers(), "stratagem-readers") as threads:
            for _ in threads.map(read, chunks):
                pass
        return arrays

    def verify(
        self, item: str, entry: Mapping[str, Any], regions: Sequence[Region] | None = None
    ) -> None:
        """Raises DataLossError if a part of an array is damaged."""
        for chunk in _chunks(entry):
            if regions is None or any(_overlap(chunk.region, one) is not None for one in regions):
                self._read_chunk(item, entry, chunk, [])

    def _read_chunk(
        self,
        item: str,
        entry: Mapping[str, Any],
        chunk: _Chunk,
        targets: list[tuple[_Array, Region, Region]],
    ) -> None:
        shape = [one.stop - one.start for one in chunk.region]
        direct = _direct_target(chunk, targets)
        content = np.empty(shape, np.dtype(entry["dtype"])) if direct is None else direct
        if not self._is_read(item, chunk, content.reshape(-1).view(np.uint8)):
            raise damage_error(
                str(self._folder), f"the array {entry['path']} differs from the saved one"
            )
        for array, region, common in targets:
            part = array[_within(common, region)]
            if not np.may_share_memory(part, content):
                part[...] = content[_within(common, chunk.region)]

    def _is_read(self, item: str, chunk: _Chunk, target: _Array) -> bool:
        location = self._locations(item).get(chunk.key)
        try:
            if location is not None:
                return read_bytes(location, target.size, target) == chunk.crc32
            # Small values are in the tree of the database, and a large tree has several levels.
            if item not in self._databases:
                self._databases[item] = open_database(self._folder / item)
            value = self._databases[item].read(chunk.key).result().value[: target.size]
        except (OSError, ValueError, KeyError):
            return False
        if len(value) != target.size:
            return False
        target[:] = np.frombuffer(value, np.uint8)
        return zlib.crc32(value) == chunk.crc32

    def _locations(self, item: str) -> dict[str, Location]:
        if item not in self._items:
            self._items[item] = locations_of(self._folder / item)
        return self._items[item]


def read_sharded_arrays(
    folder: Path, entries: _Entries, receive: Receiver | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the arrays that were saved as shards by item and path, as `read_large_arrays`."""
    reader = ShardReader(folder)
    read: dict[str, dict[str, Any]] = {}
    for name, entry in _sharded(entries):
        (whole,) = reader.read(name, entry)
        read.setdefault(name, {})[entry["path"]] = whole if receive is None else receive(whole)
    return read


def verify_sharded_arrays(folder: Path, entries: _Entries) -> dict[str, dict[str, bool]]:
    """Returns True by item and path for arrays that were saved as shards.

    Raises DataLossError if one is damaged.
    """
    reader = ShardReader(folder)
    found: dict[str, dict[str, bool]] = {}
    for name, entry in _sharded(entries):
        reader.verify(name, entry)
        found.setdefault(name, {})[entry["path"]] = True
    return found


def _sharded(entries: _Entries) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, some in entries.items():
        yield from ((name, entry) for entry in some if is_sharded_entry(entry))


def _chunks(entry: Mapping[str, Any]) -> Iterator[_Chunk]:
    shape = entry["shape"]
    shard_shape = entry.get("shard_shape", shape)
    checksums = entry["crc32"] if is_sharded_entry(entry) else [entry["crc32"]]
    grid = [size // part if part else 1 for size, part in zip(shape, shard_shape, strict=True)]
    for position, crc32 in zip(np.ndindex(*grid), checksums, strict=True):
        region = tuple(
            slice(at * part, (at + 1) * part)
            for at, part in zip(position, shard_shape, strict=True)
        )
        yield _Chunk(shard_key(entry["path"], position), region, crc32)


def _overlap(one: Region, other: Region) -> Region | None:
    """Returns the intersection of two regions; None if it is empty."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(axis.start >= axis.stop for axis in common) else common


def _within(common: Region, outer: Region) -> Region:
    return tuple(
        slice(one.start - begin.start, one.stop - begin.start)
        for one, begin in zip(common, outer, strict=True)
    )


def _direct_target(chunk: _Chunk, targets: list[tuple[_Array, Region, Region]]) -> _Array | None:
    """Returns the array, or part of it, that is just the chunk, and contiguous; None without."""
    for array, region, common in targets:
        if common == chunk.region:
            part = array[_within(common, region)]
            if part.flags.c_contiguous:
                return part
    return None
