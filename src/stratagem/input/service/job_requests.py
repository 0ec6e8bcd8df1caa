"""Wishes of a consumer for a job, checked."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from stratagem.errors import explain
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import pack_batch
from stratagem.input.service.job import NumberRanges
from stratagem.input.service.splits import ShardingPolicy, checked_policy

# Splits that a worker reads, and their batches until consumers confirm them.


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


# Sliding window of batches that several trainers share, each at a pace of its own.


@dataclasses.dataclass(frozen=True)
class CrossTrainerCache:
    """Lets the trainers of a job share its batches: each gets them all, and they are read once.

    Workers keep the last batches in a window. A trainer that joins late or falls behind continues
    at the oldest batch of the window.

    Args:
        trainer_id: name of the trainer. Consumers with the same name divide the batches.

    Raises:
        ValueError: the name is empty.

    Example:
        >>> sg.input.service.CrossTrainerCache("learning rate 0.1").trainer_id
        'learning rate 0.1'

    Source: TF 2.21 data_service_ops.py, CrossTrainerCache.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise ValueError(
                explain(
                    f"CrossTrainerCache received trainer_id={self.trainer_id!r}.",
                    expected="a name, another one for each trainer.",
                    fix='pass CrossTrainerCache("trainer 0"), and so on.',
                )
            )


class SharedWindow:
    """Batches of one worker in the order of reading. Not thread-safe.

    The oldest batches that any trainer has had are dropped when the window is full. Batches that no
    trainer has had are never dropped: reading stops instead, when they fill half of the window.

    Args:
        most_bytes: size of all batches. One batch ahead of all trainers is always kept.
        most_ahead: number of batches that no trainer has had yet.
    """

    def __init__(self, most_bytes: int, most_ahead: int) -> None:
        self._most_bytes = most_bytes
        self._most_ahead = most_ahead
        # Batches from number `_first` on; None for those of splits that were lost.
        self._batches: collections.deque[PackedBatch | None] = collections.deque()
        self._first = 0
        self._front = 0  # the lowest number that no trainer has had
        self._num_bytes = self._num_bytes_ahead = 0
        self._next: dict[str, int] = {}  # by trainer

    @property
    def num_bytes(self) -> int:
        """Size of all batches in bytes."""
        return self._num_bytes

    @property
    def has_room(self) -> bool:
        """True if one more batch may be read."""
        num_ahead = self._first + len(self._batches) - self._front
        return num_ahead == 0 or (
            num_ahead < self._most_ahead and self._num_bytes_ahead < self._most_bytes // 2
        )

    def add(self, batch: PackedBatch) -> None:
        """Adds a batch, and drops the oldest if there are too many."""
        self._batches.append(batch)
        self._num_bytes += batch.num_bytes
        self._num_bytes_ahead += batch.num_bytes
        while self._num_bytes > self._most_bytes and self._first < self._front:
            dropped = self._batches.popleft()
            self._first += 1
            self._num_bytes -= _size(dropped)

    def next(self, trainer: str) -> PackedBatch | None:
        """Returns the next batch for a trainer, None if there is none yet."""
        number = max(self._next.get(trainer, 0), self._first)
        end = self._first + len(self._batches)
        while number < end:
            batch = self._batches[number - self._first]
            number += 1
            if number > self._front:
                self._front = number
                self._num_bytes_ahead -= _size(batch)
            if batch is not None:
                self._next[trainer] = number
                return batch
        self._next[trainer] = number
        return None

    def remove(self, held: HeldSplit) -> None:
        """Removes the batches of a split that another worker reads from now on."""
        for place, batch in enumerate(self._batches):
            if batch is not None and batch.held is held:
                self._batches[place] = None
                self._num_bytes -= batch.num_bytes
                if self._first + place >= self._front:
                    self._num_bytes_ahead -= batch.num_bytes


def _size(batch: PackedBatch | None) -> int:
    return 0 if batch is None else batch.num_bytes


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """Wishes of a consumer for a job.

    Args:
        policy: number of the `ShardingPolicy`.
        job: name of the job; None for one of this consumer alone.
        consumer_index: index of the consumer in coordinated reads.
        num_consumers: number of consumers in coordinated reads.
        most_ahead: number of batches that are fetched ahead; None for the default.
        is_exact: each batch must be visited exactly once.
        skip_errors: number of batches that may be skipped because they cannot be read.
        dataset_id: the registered dataset.
        trainer: name of the trainer that shares a window with others; None without.
    """

    policy: int
    job: str | None
    consumer_index: int | None
    num_consumers: int | None
    most_ahead: int | None
    is_exact: bool
    skip_errors: int = 0
    dataset_id: str = ""
    trainer: str | None = None

    @classmethod
    def checked(
        cls,
        processing_mode: object,
        job: str | None,
        consumer_index: int | None,
        num_consumers: int | None,
        most_ahead: int | None,
        is_exact: bool,
        skip_errors: int = 0,
        cache: CrossTrainerCache | None = None,
    ) -> JobRequest:
        """Returns the request of these options; raises ValueError if they do not fit."""
        policy = checked_policy(processing_mode)
        _check_consumers(job, consumer_index, num_consumers)
        if most_ahead is not None and most_ahead < 1:
            raise ValueError(
                explain(
                    f"max_outstanding_requests={most_ahead} is out of range.",
                    expected="1 or more batches.",
                    fix="omit it for 2 batches per worker.",
                )
            )
        if is_exact and policy is ShardingPolicy.OFF and num_consumers is None:
            raise ValueError(
                explain(
                    "exactly_once=True was passed with ShardingPolicy.OFF, with which each worker "
                    "reads all data.",
                    expected="a policy that divides the data.",
                    fix='pass "distributed_epoch" (DYNAMIC).',
                )
            )
        if skip_errors < 0 or (skip_errors and num_consumers is not None):
            raise ValueError(
                explain(
                    f"skip_errors={skip_errors} was passed with num_consumers={num_consumers}.",
                    expected="0 or more, and 0 in coordinated reads: consumers would lose step.",
                    fix="omit skip_errors or num_consumers.",
                )
            )
        if cache is not None:
            _check_cache(job, num_consumers, is_exact=is_exact)
        trainer = None if cache is None else cache.trainer_id
        consumer = job, consumer_index, num_consumers
        return cls(int(policy), *consumer, most_ahead, is_exact, skip_errors, trainer=trainer)


def _check_cache(job: str | None, num_consumers: int | None, *, is_exact: bool) -> None:
    if not job or num_consumers is not None or is_exact:
        raise ValueError(
            explain(
                f"CrossTrainerCache was passed with job_name={job!r}, "
                f"num_consumers={num_consumers} and exactly_once={is_exact}.",
                expected="job_name, and neither coordinated reads nor exactly_once: a trainer that "
                "falls behind misses batches.",
                fix="pass job_name, and omit the others.",
            )
        )


def _check_consumers(
    job: str | None, consumer_index: int | None, num_consumers: int | None
) -> None:
    if job == "":
        raise ValueError(
            explain(
                "job_name is empty.",
                expected="a name that the consumers of the job share, or None.",
                fix="omit job_name for a job of this process alone.",
            )
        )
    if (consumer_index is None) != (num_consumers is None) or (num_consumers and not job):
        raise ValueError(
            explain(
                f"distribute received job_name={job!r}, consumer_index={consumer_index} and "
                f"num_consumers={num_consumers}.",
                expected="consumer_index and num_consumers together, with job_name.",
                fix="pass all three for coordinated reads, or none of consumer_index and "
                "num_consumers.",
            )
        )
    if num_consumers is not None and not 0 <= (consumer_index or 0) < num_consumers:
        raise ValueError(
            explain(
                f"consumer_index={consumer_index} is out of range for {num_consumers} consumers.",
                expected="0 <= consumer_index < num_consumers.",
                fix="pass the index of this process among the consumers.",
            )
        )
