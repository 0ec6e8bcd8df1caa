"""Bound on the memory of inputs of calls that the devices have not finished."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

# JAX lets the host run up to 32 calls ahead of the devices, and each holds its input.
_MOST_CALLS_OF_JAX = 32
_MOST_BYTES = 1 << 30
# One call runs and one waits, however large they are, so that the devices are never idle.
_LEAST_CALLS = 2


class _UndonatedOutput(Protocol):
    def block_until_ready(self) -> object: ...


class QueuedInput:
    """Waits for earlier calls of a program while too much of their input is on a device."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[_UndonatedOutput, int]] = collections.deque()
        self._total_bytes = 0

    def add(self, output: _UndonatedOutput, size_bytes: int) -> None:
        """Counts a call that has just started, by an output that no later program donates."""
        self._calls.append((output, size_bytes))
        self._total_bytes += size_bytes
        while self._total_bytes > _MOST_BYTES and len(self._calls) > _LEAST_CALLS:
            first, first_bytes = self._calls.popleft()
            self._total_bytes -= first_bytes
            first.block_until_ready()


def is_large(size_bytes: int) -> bool:
    """Returns True if JAX's own limit lets too much input of this size wait on a device."""
    return size_bytes * _MOST_CALLS_OF_JAX > _MOST_BYTES


def input_bytes(arrays: Sequence[Any]) -> int:
    """Returns the size of arrays or of values in a trace; other values count as nothing."""
    return sum(array.size * array.dtype.itemsize for array in arrays if hasattr(array, "dtype"))
