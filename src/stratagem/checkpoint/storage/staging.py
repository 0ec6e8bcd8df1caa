"""Shared memory through which two processes exchange arrays."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from stratagem.checkpoint.storage.pending import PendingArray, receive
from stratagem.processor_time import available_cores

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

    def put(
        self,
        items: Mapping[str, Mapping[str, np.ndarray[Any, Any] | PendingArray]],
        *,
        begin_bytes: int = 0,
    ) -> list[ArrayLocation]:
        """Copies arrays into the memory, overwriting earlier ones, and returns all locations.

        Arrays on a device follow with `fill`. Leaves `begin_bytes` free at the start. Raises
        OSError without enough memory.
        """
        locations = _layout(items, begin_bytes)
        copies = [
            (one, array)
            for one in locations
            if not isinstance(array := items[one.item][one.path], PendingArray)
        ]
        self._reach(end_bytes(one for one, _ in copies))
        _copy([(self._view(one), array) for one, array in copies])
        return locations

    def fill(self, pending: list[tuple[ArrayLocation, PendingArray]]) -> None:
        """Copies arrays from devices to the locations that `put` returned, and frees them there.

        Raises OSError without enough memory.
        """
        try:
            self._reach(end_bytes(location for location, _ in pending))
            receive((self._view(location), array) for location, array in pending)
        finally:
            for _, array in pending:
                array.release()

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


def _layout(
    items: Mapping[str, Mapping[str, np.ndarray[Any, Any] | PendingArray]], begin_bytes: int
) -> list[ArrayLocation]:
    """Returns locations in the order of the arrays; those on a device are behind the others."""
    arrays = [(item, path, array) for item, of in items.items() for path, array in of.items()]
    offsets_bytes: dict[int, int] = {}
    for index, (_, _, array) in sorted(
        enumerate(arrays), key=lambda one: isinstance(one[1][2], PendingArray)
    ):
        offsets_bytes[index] = begin_bytes
        begin_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return [
        ArrayLocation(item, path, array.shape, str(array.dtype), offsets_bytes[index])
        for index, (item, path, array) in enumerate(arrays)
    ]


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
