"""Parts of saved arrays, read without the rest: each process reads what its devices need.

A chunk, that is a saved shard or an array that was saved whole, is the least that is read, because
its checksum is that of all its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from stratagem.checkpoint.storage.shards import INSTALL, open_database, shard_key
from stratagem.environment import load
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


# Arrays, read from Orbax's files without Orbax, which would synchronize JAX's group.
#
# Orbax and TensorStore read a chunk to memory of their own, then copy it, and fresh memory costs
# more time than the disk. A chunk that is not compressed is contiguous in its file: a saved shard,
# or an array that was saved whole. Here it is read once, and verified while it is in the
# processor's cache. The checksum of the manifest decides: an array that was saved whole and is not
# found so, or differs, has another layout, which TensorStore reads, or is damaged.

Region = tuple[slice, ...]
"""Part of an array: a slice with a start and an end for each axis."""

_Array = np.ndarray[Any, Any]

Receiver = Callable[[_Array], Any]
"""Copies a verified array, whose memory is used again; the reader returns the copy in its place."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_Entries = Mapping[str, Sequence[Mapping[str, Any]]]

# Smaller arrays are returned as they are: another copy costs more than their memory.
_MIN_BYTES = 2**20
# Read and verified at once: fits the cache of a core.
_PIECE_BYTES = 2**19
_MAX_READERS = 4


@dataclasses.dataclass(frozen=True)
class _Location:
    """Place of a value in a file."""

    file: Path
    offset_bytes: int


@dataclasses.dataclass(frozen=True)
class _Chunk:
    key: str
    region: Region
    crc32: int


def read_whole(
    folder: Path, entries: _Entries, receive: Receiver | None = None
) -> dict[str, dict[str, Any]]:
    """Returns arrays by item and path; large ones as `receive` returns them.

    Raises DataLossError if one is damaged.
    """
    reader, found = ShardReader(folder), _pairs(entries)
    scratch = SimpleQueue[_Array]()
    largest_bytes = max((_size_bytes(entry) for _, entry in found), default=0)
    for _ in range(_num_readers() if receive and largest_bytes >= _MIN_BYTES else 0):
        scratch.put(np.empty(largest_bytes, np.uint8))

    def read(one: tuple[str, Mapping[str, Any]]) -> Any:
        (item, entry), size_bytes = one, _size_bytes(one[1])
        is_received = receive is not None and size_bytes >= _MIN_BYTES
        memory = scratch.get() if is_received else np.empty(size_bytes, np.uint8)
        try:
            array = memory[:size_bytes].view(entry["dtype"]).reshape(entry["shape"])
            reader.fill(item, entry, [(array, tuple(slice(0, size) for size in entry["shape"]))])
            return receive(array) if receive is not None and is_received else array
        finally:
            if is_received:
                scratch.put(memory)

    read_by_path: dict[str, dict[str, Any]] = {item: {} for item in entries}
    for (item, entry), array in zip(found, _in_threads(read, found), strict=True):
        read_by_path[item][entry["path"]] = array
    return read_by_path


def verify_whole(folder: Path, entries: _Entries) -> None:
    """Raises DataLossError if an array is damaged."""
    reader = ShardReader(folder)
    _in_threads(lambda one: reader.verify(*one), _pairs(entries))


def _pairs(entries: _Entries) -> list[tuple[str, Mapping[str, Any]]]:
    return [(item, entry) for item, some in entries.items() for entry in some]


def _num_readers() -> int:
    """Returns at least two: one waits for the disk while another verifies."""
    return min(_MAX_READERS, max(2, int(available_cores())))


def _in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Returns the results for all items, in order, or raises the first error once all are done.

    Unlike those of an executor, the threads do not keep the process from its end: a disk may hang.
    """
    futures = [Future[_Result]() for _ in items]
    left = deque(zip(futures, items, strict=True))

    def run() -> None:
        with contextlib.suppress(IndexError):
            while True:
                future, item = left.popleft()
                try:
                    future.set_result(work(item))
                except BaseException as error:  # noqa: BLE001 - raised by `result`
                    future.set_exception(error)

    for _ in range(min(_num_readers(), len(items))):
        threading.Thread(target=run, name="stratagem-readers", daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]


class ShardReader:
    """Reads and verifies parts of the arrays of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._items: dict[str, dict[str, _Location]] = {}
        self._databases: dict[str, Any] = {}

    def read(self, item: str, entry: Mapping[str, Any], regions: Sequence[Region]) -> list[_Array]:
        """Returns the regions of an array; raises DataLossError if it is damaged."""
        dtype = np.dtype(entry["dtype"])
        arrays = [np.empty([one.stop - one.start for one in region], dtype) for region in regions]
        self.fill(item, entry, list(zip(arrays, regions, strict=True)))
        return arrays

    def fill(
        self, item: str, entry: Mapping[str, Any], parts: Sequence[tuple[_Array, Region]]
    ) -> None:
        """Reads regions of an array to memory; raises DataLossError if it is damaged."""
        try:
            self._fill(item, entry, parts)
        except DataLossError:
            if is_sharded_entry(entry):
                raise
            whole = self._read_other(item, entry)
            for array, region in parts:
                array[...] = whole[region]

    def _fill(
        self, item: str, entry: Mapping[str, Any], parts: Sequence[tuple[_Array, Region]]
    ) -> None:
        def read(chunk: _Chunk) -> None:
            targets = [
                (array, region, common)
                for array, region in parts
                if (common := _overlap(chunk.region, region)) is not None
            ]
            if targets:
                self._read_chunk(item, entry, chunk, targets)

        if not is_sharded_entry(entry):
            for chunk in _chunks(entry):
                read(chunk)
            return
        _in_threads(read, list(_chunks(entry)))

    def verify(
        self, item: str, entry: Mapping[str, Any], regions: Sequence[Region] | None = None
    ) -> None:
        """Raises DataLossError if a part of an array is damaged."""
        if not _size_bytes(entry):  # in the manifest only
            return
        try:
            for chunk in _chunks(entry):
                wanted = (_overlap(chunk.region, one) for one in regions or [chunk.region])
                if any(one is not None for one in wanted):
                    self._require(item, entry, chunk, None)
        except DataLossError:
            if is_sharded_entry(entry):
                raise
            self._read_other(item, entry)

    def _read_other(self, item: str, entry: Mapping[str, Any]) -> _Array:
        """Reads an array of another layout, such as a compressed one, by TensorStore."""
        key = entry["path"].replace("/", ".")
        place: dict[str, Any] = {"driver": "file", "path": f"{self._folder / item}/"}
        if (self._folder / item / "manifest.ocdbt").exists():
            place = {"driver": "ocdbt", "base": place, "path": f"{key}/"}
        else:
            place["path"] += f"{key}/"
        tensorstore = load("tensorstore", needed_by="A checkpoint", install=INSTALL)
        try:
            found = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
            array = np.asarray(found.read().result())
        except (ValueError, OSError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            how = f"the array {entry['path']} cannot be read ({reason})"
            raise damage_error(str(self._folder), how) from error
        check_array(entry, array, str(self._folder))
        return array

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
        self._require(item, entry, chunk, content.reshape(-1).view(np.uint8))
        for array, region, common in targets:
            part = array[_within(common, region)]
            if not np.may_share_memory(part, content):
                part[...] = content[_within(common, chunk.region)]

    def _require(
        self, item: str, entry: Mapping[str, Any], chunk: _Chunk, target: _Array | None
    ) -> None:
        """Reads a chunk, to a target unless it is None; raises DataLossError if it is damaged."""
        size = math.prod(one.stop - one.start for one in chunk.region)
        size_bytes = size * np.dtype(entry["dtype"]).itemsize
        try:
            location = self._locations(item).get(chunk.key)
            if location is not None:
                checksum = _read_bytes(location, size_bytes, target)
            else:
                checksum = self._read_value(item, chunk, size_bytes, target)
            is_intact = checksum == chunk.crc32
        except (OSError, ValueError, KeyError):
            is_intact = False
        if not is_intact:
            how = f"the array {entry['path']} differs from the saved one"
            raise damage_error(str(self._folder), how)

    def _read_value(self, item: str, chunk: _Chunk, size_bytes: int, target: _Array | None) -> int:
        """Reads a value that is in the tree of the database; returns its checksum.

        Small values are there, and a large tree has several levels.
        """
        if item not in self._databases:
            self._databases[item] = open_database(self._folder / item)
        value = self._databases[item].read(chunk.key).result().value[:size_bytes]
        if target is not None:
            target[:] = np.frombuffer(value, np.uint8)  # a ValueError if it is too short
        return zlib.crc32(value)

    def _locations(self, item: str) -> dict[str, _Location]:
        if item not in self._items:
            self._items[item] = _locations_of(self._folder / item)
        return self._items[item]


def _read_bytes(location: _Location, size_bytes: int, target: _Array | None) -> int:
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


def _locations_of(item: Path) -> dict[str, _Location]:
    """Returns the place of each value of an OCDBT database by key; empty if it is unreadable."""
    tensorstore = load("tensorstore", needed_by="A checkpoint", install=INSTALL)
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


def _location(item: Path, value: str) -> _Location:
    """Parses value:FOLDER:FILE:OFFSET:LENGTH."""
    _, folder, file, offset, _ = value.split(":")
    return _Location(item / folder / file, int(offset))


def _size_bytes(entry: Mapping[str, Any]) -> int:
    """Returns the size of an array from its manifest entry."""
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize


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


def _within(common: Region, outer: Region) -> tuple[Any, ...]:
    """Returns the index of a region in an array of another one; a view, also of a scalar."""
    slices = (
        slice(one.start - begin.start, one.stop - begin.start)
        for one, begin in zip(common, outer, strict=True)
    )
    return (..., *slices)


def _direct_target(chunk: _Chunk, targets: list[tuple[_Array, Region, Region]]) -> _Array | None:
    """Returns the array, or part of it, that is just the chunk, and contiguous; None without."""
    for array, region, common in targets:
        if common == chunk.region:
            part = array[_within(common, region)]
            if part.flags.c_contiguous:
                return part
    return None
