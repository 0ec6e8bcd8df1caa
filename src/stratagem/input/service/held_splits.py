"""Splits that a worker reads, and their batches until consumers confirm them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import pack_batch
from stratagem.input.service.ranges import NumberRanges


@dataclasses.dataclass(frozen=True)
class WindowLimits:
    """Limits of reading ahead, in batches and in bytes; one batch is always read.

    `shared_bytes` is the size of a window that trainers share.
    """

    most_batches: int = 16
    most_bytes: int = 2**28
    shared_bytes: int = 2**30


class ReadCounts:
    """Number of batches that a worker has read, and the seconds that it took; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_read = 0
        self._read_s = 0.0

    def add(self, read_s: float) -> None:
        """Counts a batch."""
        with self._lock:
            self._num_read += 1
            self._read_s += read_s

    def as_json(self) -> dict[str, float]:
        """Returns both counts."""
        with self._lock:
            return {"num_read": self._num_read, "read_s": self._read_s}


class PackedBatch:
    """A packed batch and its identity."""

    def __init__(self, held: HeldSplit, index: int, message: Message) -> None:
        self.held = held
        self.index = index
        self.message = message
        self.num_bytes = sum(array.nbytes for array in message.arrays)

    def with_fields(self, **fields: Any) -> Message:
        """Returns its message with more fields."""
        message = self.message
        return Message(message.kind, {**message.fields, **fields}, message.arrays)


class HeldSplit:
    """A split that this worker reads. `length` is None until its end is reached."""

    def __init__(
        self, number: int, attempt: int, received: NumberRanges, is_coordinated: bool
    ) -> None:
        self.is_coordinated = is_coordinated
        self.number = number
        self.attempt = attempt
        self.received = received
        self.batches: dict[int, PackedBatch] = {}  # not confirmed yet
        self.length: int | None = None
        self.is_revoked = False
        self.reading_since_s: float | None = None
        # For coordinated reads: a batch without rows, and the consumers that reached the end.
        self.empty: Message | None = None
        self.passed: set[str] = set()
        self.is_replaced = False  # Another thread reads instead of one that may be stuck.

    @property
    def reading_s(self) -> float | None:
        """Seconds that the next batch has taken; None if none is being read."""
        since_s = self.reading_since_s
        return None if since_s is None else time.monotonic() - since_s

    @classmethod
    def given(cls, answer: Message, *, is_coordinated: bool) -> HeldSplit:
        """Returns the split that a dispatcher has given in a message."""
        fields = answer.fields
        received = NumberRanges(fields["received"])
        return cls(fields["split"], fields["attempt"], received, is_coordinated)

    def note_skipped(self) -> None:
        """Notes a batch on the way to the next one: a reader that skips many is not stuck."""
        if self.reading_since_s is not None:
            self.reading_since_s = time.monotonic()

    def next_message(
        self, batches: Iterator[Any], index: int, *, is_compressed: bool
    ) -> Message | None:
        """Reads the next batch and packs it; returns None at the end of the split."""
        try:
            batch = next(batches)
        except StopIteration:
            return None
        if self.is_coordinated:
            self.empty = pack_batch(jax.tree.map(without_rows, batch))
        fields = {"split": self.number, "index": index, "attempt": self.attempt}
        return pack_batch(batch, is_compressed=is_compressed, **fields)

    def answer_at(self, index: int, consumer: str) -> Message | None:
        """Returns a batch, or the length of the split after its end; None if it is not read yet."""
        if index in self.batches:
            return self.batches[index].message
        if self.length is None or index < self.length:
            return None  # An index that was received before is not asked for.
        self.passed.add(consumer)
        if self.empty is None:
            return Message("after_end", {"length": self.length})
        fields = {**self.empty.fields, "length": self.length}
        return Message("after_end", fields, self.empty.arrays)

    def is_done(self, num_consumers: int | None) -> bool:
        """True if all consumers have their batches; in coordinated reads, and know the end."""
        return not self.batches and len(self.passed) >= (num_consumers or 0)


def without_rows(leaf: Any) -> Any:
    """Returns an array without its rows; other values stay."""
    return leaf[:0] if getattr(leaf, "ndim", 0) else leaf
