"""Memory that two processes share, in which arrays wait to be written, or to be taken."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["Placed", "Staging", "end_bytes"]

_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where an array lies.

    Args:
        item: of the checkpoint.
        path: of the array in it.
        shape: of the array.
        dtype: its name.
        offset_bytes: from the beginning of the memory.
    """

    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """How much it takes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Staging:
    """Memory that is kept from one checkpoint to the next, and is gone with its last process.

    Fresh memory costs more than the copy into it, so it only grows.

    Args:
        descriptor: of another process's; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._memory: mmap.mmap | None = None

    def put(
        self, items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], *, begin_bytes: int = 0
    ) -> list[Placed]:
        """Copies arrays into the memory, over what was there.

        Args:
            items: arrays by path, by item.
            begin_bytes: what is left free before them.

        Returns:
            Where each lies.

        Raises:
            OSError: there is not enough memory.
        """
        placed = list(_laid_out(items, begin_bytes))
        self._reach(end_bytes(placed))
        for one in placed:
            np.copyto(self._view(one), items[one.item][one.path])
        return placed

    def get(self, placed: Iterable[Placed]) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Returns arrays where they lie; what is put next goes over them.

        Args:
            placed: what `put` returned, perhaps in another process.

        Returns:
            Arrays by path, by item; items without arrays are left out.
        """
        placed = list(placed)
        self._reach(end_bytes(placed))
        items: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        for one in placed:
            items.setdefault(one.item, {})[one.path] = self._view(one)
        return items

    def close(self) -> None:
        """Lets go of the memory; not before everybody has let go of arrays in it."""
        os.close(self.descriptor)

    def _view(self, one: Placed) -> np.ndarray[Any, Any]:
        assert self._memory is not None
        return np.ndarray(one.shape, np.dtype(one.dtype), self._memory, one.offset_bytes)

    def _reach(self, size_bytes: int) -> None:
        """Makes the memory at least so large. What is mapped anew has the pages that it had."""
        size_bytes = max(size_bytes, 1)
        if self._memory is not None and len(self._memory) >= size_bytes:
            return
        there_bytes = os.fstat(self.descriptor).st_size
        if there_bytes < size_bytes:
            _allocate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, max(size_bytes, there_bytes))


def _laid_out(
    items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], begin_bytes: int
) -> Iterator[Placed]:
    offset_bytes = begin_bytes
    for item, arrays in items.items():
        for path, array in arrays.items():
            yield Placed(item, path, array.shape, str(array.dtype), offset_bytes)
            offset_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def end_bytes(placed: Iterable[Placed]) -> int:
    """Returns how far arrays reach into the memory.

    Args:
        placed: where they lie.
    """
    return max((one.offset_bytes + one.size_bytes for one in placed), default=0)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Takes the memory now: writing to what is not there would end the process by SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:
        os.ftruncate(descriptor, size_bytes)


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("stratagem")
    with tempfile.TemporaryFile() as file:  # without a name, as the memory file is
        return os.dup(file.fileno())
