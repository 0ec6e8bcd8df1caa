"""Arrays that are still on a device when a save returns, and their way to the host."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

# In transfer at once: enough to keep the bus busy, little beside the state.
_AHEAD_BYTES = 2**29
_PLAIN_SIZES_BYTES = (1, 2, 4, 8)

Index = tuple[slice, ...]


class DevicePiece(Protocol):
    """A piece of an array on a device, as JAX's arrays are; nothing else may use its memory."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def copy_to_host_async(self) -> None:
        """Starts the transfer."""
        ...

    def delete(self) -> None:
        """Frees the memory on the device."""
        ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Waits for the transfer and returns the values."""
        ...


@dataclasses.dataclass(frozen=True)
class PendingArray:
    """An array on a device, in pieces that together cover it, each with its place in the array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[Index, DevicePiece], ...]

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def release(self) -> None:
        """Frees the memory on the device."""
        for _, piece in self.pieces:
            piece.delete()

    def on_host(self) -> np.ndarray[Any, Any]:
        """Returns the values and frees the memory on the device."""
        whole = np.empty(self.shape, self.dtype)
        receive([(whole, self)])
        return whole


def receive(pairs: Iterable[tuple[np.ndarray[Any, Any], PendingArray]]) -> None:
    """Copies arrays from devices to NumPy arrays; frees each piece once it is copied.

    Some transfers are begun ahead, so that the bus is busy during the copies. If one fails, the
    other pieces are freed, too.
    """
    pairs = list(pairs)
    try:
        _receive(pairs)
    finally:
        for _, array in pairs:
            array.release()


def _receive(pairs: list[tuple[np.ndarray[Any, Any], PendingArray]]) -> None:
    waiting: deque[tuple[np.ndarray[Any, Any], Index, DevicePiece]] = deque()
    ahead_bytes = 0
    for target, index, piece in _pieces(pairs):
        while waiting and ahead_bytes + piece.nbytes > _AHEAD_BYTES:
            ahead_bytes -= waiting[0][2].nbytes
            _land(*waiting.popleft())
        piece.copy_to_host_async()
        waiting.append((target, index, piece))
        ahead_bytes += piece.nbytes
    while waiting:
        _land(*waiting.popleft())


def _pieces(
    pairs: list[tuple[np.ndarray[Any, Any], PendingArray]],
) -> Iterator[tuple[np.ndarray[Any, Any], Index, DevicePiece]]:
    for target, array in pairs:
        for index, piece in array.pieces:
            yield target, index, piece


def _land(target: np.ndarray[Any, Any], index: Index, piece: DevicePiece) -> None:
    _plain(target)[index] = _plain(np.asarray(piece))
    piece.delete()


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Views an array as integers: copies of bfloat16 and other added dtypes hold Python's lock."""
    size_bytes = array.dtype.itemsize
    return array.view(f"u{size_bytes}") if size_bytes in _PLAIN_SIZES_BYTES else array
