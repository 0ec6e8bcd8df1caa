"""Pure state of one epoch of a job: its splits, the workers that hold them, and its consumers.

Methods that decide return records, which `apply` carries out. The dispatcher writes each record to
its journal first, so applying all records of a journal gives the same state. There are no sockets
and no clock here.

A lost split is redone in three steps. Its attempt number grows, so that consumers refuse what the
former holder still sends. Each consumer reports which batches of it arrived. Then it is free again,
without these batches.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

# Sets of numbers as half-open ranges, which stay small when numbers are added in order.

# The range of all numbers that occur.
EVERY_NUMBER = (0, 2**53)


class NumberRanges:
    """A set of numbers from 0 on. `as_json` returns sorted, disjoint ranges [start, stop)."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add_range(start, stop)

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberRanges) and self.as_json() == other.as_json()

    def __hash__(self) -> int:
        raise TypeError("NumberRanges can change")

    def __repr__(self) -> str:
        return f"NumberRanges({self.as_json()})"

    def add(self, number: int) -> None:
        """Adds one number."""
        self.add_range(number, number + 1)

    def add_range(self, start: int, stop: int) -> None:
        """Adds the numbers [start, stop)."""
        if start >= stop:
            return
        # All ranges that overlap or touch the new one become one with it.
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def update(self, other: NumberRanges) -> None:
        """Adds all numbers of another set."""
        for start, stop in zip(other._starts, other._stops, strict=True):
            self.add_range(start, stop)

    @property
    def is_everything(self) -> bool:
        """True if no number is missing."""
        return self.first_missing() >= EVERY_NUMBER[1]

    def first_missing(self) -> int:
        """Returns the lowest number that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def as_json(self) -> list[list[int]]:
        """Returns the ranges as lists."""
        return [[start, stop] for start, stop in zip(self._starts, self._stops, strict=True)]


Record = dict[str, Any]

# A split that is lost so often in a row before any batch arrives is what its workers die of.
MOST_FRUITLESS_LOSSES = 8


@dataclasses.dataclass
class _OpenSplit:
    """A split that is held, waits for reports after a loss, or is free again.

    `received` are numbers of batches that consumers have, as far as they have reported.
    """

    number: int
    attempt: int = 0
    worker: str | None = None
    received: NumberRanges = dataclasses.field(default_factory=NumberRanges)
    awaited: set[str] = dataclasses.field(default_factory=set[str])
    is_abandoned: bool = False  # A consumer left that may have had batches of it.
    num_received_before: int = 0
    num_fruitless: int = 0

    @property
    def is_free(self) -> bool:
        return self.worker is None and not self.awaited

    def as_json(self) -> dict[str, Any]:
        return {
            "split": self.number,
            "attempt": self.attempt,
            "received": self.received.as_json(),
        }


class ServiceJob:
    """Splits of one epoch of a job.

    Args:
        num_splits: number of splits; None if there is no end.
        one_each: each worker gets one split of its own, which is not redone elsewhere.
        is_repeatable: a split that is opened again has the same batches.
        is_exact: batches of a consumer that was lost are visited again.
        skip_errors: number of batches that may be skipped because they cannot be read.
        done: splits that a restored state has completely.
        received: batches that a restored state has, by split.
        most_losses: limit of `MOST_FRUITLESS_LOSSES`.
    """

    def __init__(
        self,
        num_splits: int | None,
        *,
        one_each: bool = False,
        is_repeatable: bool = True,
        is_exact: bool = False,
        skip_errors: int = 0,
        done: NumberRanges | None = None,
        received: Mapping[int, NumberRanges] | None = None,
        most_losses: int = MOST_FRUITLESS_LOSSES,
    ) -> None:
        self.num_splits = num_splits
        self._one_each = one_each
        self._is_repeatable = is_repeatable
        self._is_exact = is_exact
        self._most_losses = most_losses
        self._skip_errors = skip_errors
        self.skipped: list[dict[str, Any]] = []
        self.done = done or NumberRanges()
        self._open: dict[int, _OpenSplit] = {}
        for number, numbers in (received or {}).items():
            if number not in self.done:
                self._open[number] = _OpenSplit(number, received=numbers)
        self._next = 0
        self.consumers: set[str] = set()
        self.num_joined = 0  # A worker compares it with that of a consumer's request.
        self._served: set[str] = set()  # workers that had a split, if each has its own
        self.num_lost = 0
        self.error: dict[str, Any] | None = None
        self.is_finished = False

    # Decisions.

    def next_split(
        self,
        worker: str,
        holding: Mapping[int, int],
        reserved: Collection[int] = (),
        *,
        only: Collection[int] | None = None,
    ) -> tuple[list[Record], dict[str, Any] | None]:
        """Returns the records and the description of a worker's next split; None if there is none.

        `holding` are the splits that the worker has, with their attempts: an assignment whose
        answer it never received is repeated. It gets none of `reserved`, and with `only`, one of
        these.
        """
        if self.is_finished or self.error is not None:
            return [], None
        for split in self._open.values():
            if split.worker == worker and holding.get(split.number) != split.attempt:
                return [], split.as_json()
        number = self._candidate(worker, reserved, only)
        if number is None:
            return [], None
        found = self._open.get(number, _OpenSplit(number))
        return [{"what": "assign", "split": number, "worker": worker}], found.as_json()

    def _candidate(
        self, worker: str, reserved: Collection[int], only: Collection[int] | None
    ) -> int | None:
        """Returns the lowest split that a worker may have."""
        if only is not None:
            return min(filter(self._is_free, only), default=None)
        freed = [one.number for one in self._open.values() if one.is_free]
        if found := [number for number in freed if number not in reserved]:
            return min(found)
        if self._one_each and worker in self._served:
            return None
        number = self._next
        while self.num_splits is None or number < self.num_splits:
            if number not in reserved and self._is_free(number):
                return number
            number += 1
        return None

    def _is_free(self, number: int) -> bool:
        if number in self._open:
            return self._open[number].is_free
        return number not in self.done and (self.num_splits is None or number < self.num_splits)

    def done_split(self, worker: str, split: int, attempt: int) -> list[Record]:
        """Returns the records of a split whose batches have all arrived."""
        held = self._open.get(split)
        if held is None or held.worker != worker or held.attempt != attempt:
            return []
        return [{"what": "done", "split": split}]

    def lose_worker(self, worker: str) -> list[Record]:
        """Returns the records of the loss of a worker."""
        held = [split.number for split in self._open.values() if split.worker == worker]
        owes = any(worker in split.awaited for split in self._open.values())
        records = [{"what": "lose", "split": number} for number in held]
        return [*records, {"what": "leave", "consumer": worker}] if owes else records

    def lose_split(self, worker: str, split: int, attempt: int) -> list[Record]:
        """Returns the records that take a split from a live worker, which must report, too."""
        held = self._open.get(split)
        if held is None or held.worker != worker or held.attempt != attempt:
            return []
        return [{"what": "lose", "split": split, "from": worker}]

    def report(
        self, consumer: str, split: int, attempt: int, ranges: Iterable[Any]
    ) -> list[Record]:
        """Returns the records of a consumer's report after the loss of a split."""
        lost = self._open.get(split)
        if lost is None or lost.attempt != attempt or consumer not in lost.awaited:
            return []
        return [{"what": "report", "split": split, "consumer": consumer, "ranges": [*ranges]}]

    def fail(self, error: dict[str, Any]) -> tuple[list[Record], bool]:
        """Returns the records of a batch that cannot be read, and True if it is skipped."""
        place = [error.get("split"), error.get("index")]
        if any([one["split"], one["index"]] == place for one in self.skipped):
            return [], True
        if "split" in error and len(self.skipped) < self._skip_errors:
            return [{"what": "skip", "error": error}], True
        return [{"what": "fail", "error": error}], False

    def finish(self, workers: Collection[str]) -> list[Record]:
        """Returns a record if all splits are done; `workers` are the live ones."""
        if self.is_finished or self.error is not None or self._open:
            return []
        if self._one_each:
            is_kept = bool(workers) or not self.num_lost  # else a worker may still come
            is_done = bool(self._served) and self._served.issuperset(workers) and is_kept
        else:
            is_done = self.num_splits is not None and self._all_begun()
        return [{"what": "finish"}] if is_done else []

    def _all_begun(self) -> bool:
        assert self.num_splits is not None
        return all(number in self.done for number in range(self._next, self.num_splits))

    # Changes.

    def apply(self, record: Record) -> None:
        """Carries out a record."""
        getattr(self, f"_apply_{record['what']}")(record)

    def _apply_join(self, record: Record) -> None:
        self.consumers.add(record["consumer"])
        self.num_joined += 1

    def _apply_leave(self, record: Record) -> None:
        consumer = record["consumer"]
        is_consumer = consumer in self.consumers
        self.consumers.discard(consumer)
        for split in [*self._open.values()]:
            # It may have had batches of each split that is held.
            if is_consumer and not split.is_free:
                split.is_abandoned = True
            if consumer in split.awaited:
                split.awaited.discard(consumer)
                self._settle(split)

    def _apply_assign(self, record: Record) -> None:
        number, worker = record["split"], record["worker"]
        split = self._open.setdefault(number, _OpenSplit(number))
        split.worker = worker
        if self._one_each:
            self._served.add(worker)
        while self._next in self._open or self._next in self.done:
            self._next += 1

    def _apply_done(self, record: Record) -> None:
        del self._open[record["split"]]
        self.done.add(record["split"])

    def _apply_lose(self, record: Record) -> None:
        split = self._open[record["split"]]
        split.worker = None
        if self._one_each:
            self._drop(split)
            return
        split.attempt += 1
        split.awaited = {*self.consumers, *([record["from"]] if "from" in record else [])}
        split.num_received_before = len(split.received)
        self._settle(split)

    def _apply_report(self, record: Record) -> None:
        split = self._open[record["split"]]
        split.received.update(NumberRanges(record["ranges"]))
        split.awaited.discard(record["consumer"])
        self._settle(split)

    def _settle(self, split: _OpenSplit) -> None:
        """Frees a lost split once all consumers have reported, or drops its rest."""
        if split.awaited:
            return
        is_fruitless = len(split.received) == split.num_received_before
        split.num_fruitless = split.num_fruitless + 1 if is_fruitless else 0
        # What a lost consumer had of it is unknown.
        is_unknown = split.is_abandoned and not self._is_exact
        split.is_abandoned = False
        if split.received.is_everything:
            del self._open[split.number]
            self.done.add(split.number)
        elif is_unknown or (split.received and not self._is_repeatable):
            self._drop(split)
        elif split.num_fruitless >= self._most_losses:
            self.error = {"kind": "losses", "split": split.number, "count": split.num_fruitless}

    def _drop(self, split: _OpenSplit) -> None:
        del self._open[split.number]
        self.done.add(split.number)
        self.num_lost += 1

    def _apply_finish(self, record: Record) -> None:
        self.is_finished = True

    def _apply_skip(self, record: Record) -> None:
        self.skipped.append(record["error"])

    def _apply_fail(self, record: Record) -> None:
        self.error = record["error"]

    # Views.

    def awaited_of(self, consumer: str) -> dict[int, int]:
        """Returns the lost splits that a consumer or worker has to report, and their attempts."""
        return {
            split.number: split.attempt
            for split in self._open.values()
            if consumer in split.awaited
        }

    @property
    def attempts(self) -> dict[int, int]:
        """Attempts of the splits that were lost and are not done; earlier ones are refused."""
        return {split.number: split.attempt for split in self._open.values() if split.attempt}

    @property
    def holders(self) -> set[str]:
        """Workers that hold a split."""
        return {split.worker for split in self._open.values() if split.worker is not None}

    def must_finish(self, worker: str) -> bool:
        """True if the rest of a split would be lost with a worker."""
        is_safe = self._is_repeatable and not self._one_each
        return not is_safe and worker in self.holders

    def holder_of(self, split: int) -> tuple[str, int] | None:
        """Returns the worker that holds a split and its attempt; None if it is not held."""
        held = self._open.get(split)
        return None if held is None or held.worker is None else (held.worker, held.attempt)
