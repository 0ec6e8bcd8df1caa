"""One epoch of a job at a worker: splits that are read ahead, and batches that wait for consumers.

A batch is kept until its consumer confirms it with the next request. So a request that is sent
again gets the same batch.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import AUTO, ZSTD, checked_compression, is_available
from stratagem.input.service.consumer import describe_read_error
from stratagem.input.service.job_requests import (
    HeldSplit,
    PackedBatch,
    ReadCounts,
    SharedWindow,
    WindowLimits,
)
from stratagem.input.service.splits import SplitPlan, facts_of, read_split
from stratagem.input.sources.source import Source

# Wishes that consumers of a job send with each request for a batch.


class ConsumerWishes:
    """Trainers of the consumers of a job, and whether it compresses their batches.

    Args:
        compression: of the job; see `checked_compression`.

    Raises:
        ImportError: the job needs zstandard, which is not installed.
    """

    def __init__(self, compression: str | None) -> None:
        self._compression = checked_compression(compression)
        self._last: dict[str, dict[str, Any]] = {}

    def note(self, fields: dict[str, Any]) -> None:
        """Notes the fields of a request."""
        self._last[fields["consumer"]] = fields

    def keep(self, consumers: Collection[str], num_joined: int) -> None:
        """Forgets other consumers of the first `num_joined`."""
        self._last = {
            name: last
            for name, last in self._last.items()
            if name in consumers or last["num_joined"] > num_joined
        }

    def num_joined(self, consumer: str) -> int:
        """Returns how many consumers had joined the job when this one did, with itself."""
        return self._last[consumer]["num_joined"]

    def trainer_of(self, consumer: str) -> str:
        """Returns the trainer of a consumer, in a job with a shared window."""
        return self._last[consumer]["trainer"]

    @property
    def is_compressed(self) -> bool:
        """True if the worker compresses the next batch.

        With "AUTO", it does if a consumer is on another machine.
        """
        if self._compression != AUTO:
            return self._compression == ZSTD
        return is_available() and any(last["compression"] for last in self._last.values())


# Requests of a worker to its dispatcher about one run.

_AGAIN_S = 0.1


class WorkerReports:
    """Asks the dispatcher about a run, again and again while it is away.

    `ask` sends one request. All answers are None once the run is over here, after `end`.
    """

    def __init__(self, run: str, worker: str, ask: Callable[[Message], Message]) -> None:
        self._run = run
        self._worker = worker
        self._ask_once = ask
        self._has_ended = threading.Event()

    def end(self) -> None:
        """Ends the requests."""
        self._has_ended.set()

    def next_split(self, holding: Mapping[int, int], *, only_wanted: bool) -> Message | None:
        """Asks for a split; `holding` are those that the worker has, with their attempts."""
        return self._ask("next_split", holding={**holding}, only_wanted=only_wanted)

    def done(self, split: int, attempt: int) -> bool:
        """Reports that all batches of a split have arrived; returns True once it is noted."""
        return self._ask("done_split", split=split, attempt=attempt) is not None

    def dropped(self, split: int, attempt: int) -> None:
        """Reports that the worker sends no more of a split that was taken from it."""
        fields = {"split": split, "attempt": attempt + 1, "ranges": []}
        self._ask("report", reporter=self._worker, **fields)

    def failed(self, error: dict[str, Any]) -> bool:
        """Reports an error of reading a batch; returns True if the batch is skipped."""
        answer = self._ask("fail", error=error)
        return answer is not None and answer.kind == "skip"

    def _ask(self, kind: str, **fields: Any) -> Message | None:
        message = Message(kind, {"run": self._run, "worker": self._worker, **fields})
        while not self._has_ended.is_set():
            try:
                return self._ask_once(message)
            except (UnavailableError, ServerError):
                self._has_ended.wait(_AGAIN_S)
        return None


_END, _MOVED, _NOTED = Message("end"), Message("moved"), Message("noted")


class WorkerJob:
    """Reads splits of a run, and hands their batches out.

    Args:
        run: identifier of the run.
        spec: description of the run from the dispatcher.
        source: the dataset.
        worker: name of this worker.
        ask: sends a request to the dispatcher.
        limits: how far to read ahead.
        counts: gets the time of each batch.
    """

    def __init__(
        self,
        run: str,
        spec: dict[str, Any],
        source: Source,
        *,
        worker: str,
        ask: Callable[[Message], Message],
        limits: WindowLimits,
        counts: ReadCounts | None = None,
    ) -> None:
        self._run = run
        self._reports = WorkerReports(run, worker, ask)
        self._limits = limits
        self._counts = counts or ReadCounts()
        self._source = source
        self._plan = SplitPlan(**spec["plan"])
        self._epoch: int = spec["epoch"]
        self._num_consumers: int | None = spec["num_consumers"]
        self._is_exact: bool = spec["is_exact"]
        window = SharedWindow(limits.shared_bytes, limits.most_batches)
        self._shared = window if spec["is_shared"] else None
        self._wishes = ConsumerWishes(spec["compression"])
        self._may_skip = spec["skip_errors"] > 0
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._held: dict[int, HeldSplit] = {}
        self._queue: collections.deque[PackedBatch] = collections.deque()  # not handed out
        # Last batch of each consumer, by its request number, until it is confirmed.
        self._handed: dict[str, tuple[int, PackedBatch]] = {}
        self._waiting: dict[str, tuple[int, Request]] = {}
        self._waiting_for: list[tuple[int, int, str, Request]] = []  # coordinated: split, index
        # Splits that ended and their lengths, and how many of these each consumer knows.
        self._ended: list[list[int]] = []
        self._num_known: dict[str, int] = {}
        self._window_batches = self._window_bytes = 0
        self._num_readers = self._num_blocked = 0
        self._is_over = False
        self._start_reader(only_wanted=False)

    # Requests of consumers.

    def next_batch(self, request: Request) -> None:
        """Answers with the next batch for a consumer.

        Request number n confirms the batch of request n - 1; the same number gets the same batch.
        """
        fields = request.message.fields
        consumer, number = fields["consumer"], fields["number"]
        with self._changed:
            self._wishes.note(fields)
            handed = self._handed.get(consumer)
            if handed is not None and handed[0] == number:
                request.answer(self._answer_with(handed[1], consumer))
                return
            self._confirm_up_to(consumer, number - 1)
            self._waiting[consumer] = number, request
            self._hand_out()

    def received(self, request: Request) -> None:
        """Notes that a consumer has its last batch, before it asks for the next one."""
        fields = request.message.fields
        with self._changed:
            self._confirm_up_to(fields["consumer"], fields["number"])
        request.answer(_NOTED)

    def _confirm_up_to(self, consumer: str, number: int) -> None:
        """Confirms the last batch of a consumer, unless its number is larger."""
        if consumer in self._handed and self._handed[consumer][0] <= number:
            self._confirm(self._handed.pop(consumer)[1])

    def batch_at(self, request: Request) -> None:
        """Answers with one batch of a split, for coordinated reads."""
        fields = request.message.fields
        with self._changed:
            self._wishes.note(fields)
            wanted = fields["split"], fields["index"], fields["consumer"], request
            self._waiting_for.append(wanted)
            self._hand_out()
            self._changed.notify_all()  # there is room for a split that is waited for

    def confirm(self, request: Request) -> None:
        """Notes that a consumer has a batch, for coordinated reads."""
        fields = request.message.fields
        with self._changed:
            held = self._held.get(fields["split"])
            if held is not None and fields["index"] in held.batches:
                self._confirm(held.batches[fields["index"]])
        request.answer(_NOTED)

    def _hand_out(self) -> None:
        for consumer, (number, request) in [*self._waiting.items()]:
            batch = None if self._is_over else self._next_for(consumer)
            if batch is not None:
                self._handed[consumer] = number, batch
                request.answer(self._answer_with(batch, consumer))
            elif self._is_over:
                request.answer(_END)
            else:
                continue
            del self._waiting[consumer]
        waiting, self._waiting_for = self._waiting_for, []
        for split, index, consumer, request in waiting:
            held = self._held.get(split)
            answer = _MOVED if self._is_over or held is None else held.answer_at(index, consumer)
            if answer is None:
                self._waiting_for.append((split, index, consumer, request))
            else:
                self._changed.notify_all()  # the consumer may be the last to know the end
                request.answer(answer)

    def _next_for(self, consumer: str) -> PackedBatch | None:
        if self._shared is None:
            return self._queue.popleft() if self._queue else None
        self._changed.notify_all()  # there may be room for the next one
        return self._shared.next(self._wishes.trainer_of(consumer))

    def _answer_with(self, batch: PackedBatch, consumer: str) -> Message:
        ended = self._ended[self._num_known.get(consumer, 0) :]
        self._num_known[consumer] = len(self._ended)
        return batch.with_fields(ended=ended)

    def _confirm(self, batch: PackedBatch) -> None:
        if batch.held.batches.pop(batch.index, None) is None:
            return
        self._window_batches -= 1
        self._window_bytes -= batch.num_bytes
        self._changed.notify_all()

    # News from the dispatcher.

    def update(self, spec: dict[str, Any]) -> None:
        """Notes who is a consumer, and starts a reader if consumers wait for a split."""
        with self._changed:
            for consumer in self._handed.keys() - set(spec["consumers"]):
                if self._wishes.num_joined(consumer) > spec["num_joined"]:
                    continue  # It joined after this was sent.
                _, batch = self._handed.pop(consumer)
                if self._is_exact:
                    self._queue.appendleft(batch)
                else:
                    self._confirm(batch)
            for consumer in self._waiting.keys() - set(spec["consumers"]):
                # If this worker has not heard of it yet, it asks again.
                self._waiting.pop(consumer)[1].answer(_MOVED)
            self._wishes.keep(spec["consumers"], spec["num_joined"])
            self._hand_out()
            # Batches of splits that come later may fill the window.
            if spec["wanted"] and self._num_blocked == self._num_readers and not self._is_over:
                self._start_reader(only_wanted=True)

    def revoke(self, split: int, attempt: int) -> None:
        """Drops a split that was given to another worker."""
        with self._changed:
            held = self._held.get(split)
            if held is None or held.attempt != attempt or held.is_revoked:
                return
            self._drop(held)
        self._reports.dropped(split, attempt)

    def _drop(self, held: HeldSplit) -> None:
        held.is_revoked = True
        self._held.pop(held.number, None)
        self._queue = collections.deque(one for one in self._queue if one.held is not held)
        if self._shared is not None:
            self._shared.remove(held)
        self._handed = {name: one for name, one in self._handed.items() if one[1].held is not held}
        for batch in [*held.batches.values()]:
            self._confirm(batch)
        if held.reading_since_s is not None and not self._is_over:
            held.is_replaced = True
            self._start_reader(only_wanted=False)
        self._hand_out()

    def reading(self) -> list[list[Any]]:
        """Returns splits being read, their attempts, and how long their next batch has taken."""
        with self._changed:
            held = [(one, one.reading_s) for one in self._held.values()]
        return [[self._run, one.number, one.attempt, s] for one, s in held if s is not None]

    def close(self) -> None:
        """Ends the run at this worker, and the requests that wait."""
        with self._changed:
            self._is_over = True
            self._reports.end()
            self._hand_out()
            self._changed.notify_all()

    # Reading.

    def _start_reader(self, *, only_wanted: bool) -> None:
        self._num_readers += 1
        threading.Thread(
            target=self._read_splits, args=(only_wanted,), name="input reader", daemon=True
        ).start()

    def _read_splits(self, only_wanted: bool) -> None:
        try:
            while not self._is_over:
                held = self._next_split(only_wanted=only_wanted)
                if held is not None:
                    self._read(held, has_own_window=only_wanted)
                if only_wanted or (held is not None and held.is_replaced):
                    return
        finally:
            with self._changed:
                self._num_readers -= 1

    def _next_split(self, *, only_wanted: bool) -> HeldSplit | None:
        with self._asking:  # Two assignments at once look the same.
            with self._changed:
                holding = {held.number: held.attempt for held in self._held.values()}
            answer = self._reports.next_split(holding, only_wanted=only_wanted)
            if answer is None or answer.kind == "wait":
                return None
            with self._changed:
                if answer.kind == "end":
                    self._is_over = True
                    self._hand_out()
                    return None
                held = HeldSplit.given(answer, is_coordinated=self._num_consumers is not None)
                self._held[held.number] = held
                return held

    def _read(self, held: HeldSplit, *, has_own_window: bool) -> None:
        # A group of coordinated reads that is not complete needs a batch as its model.
        length = max(0, held.received.first_missing() - (self._num_consumers or 0))
        index: int | None = length
        while index is not None:
            place = {"epoch": self._epoch, "split": held.number, "first": index}
            note = held.note_skipped
            batches = read_split(self._source, self._plan, **place, note_skipped=note)
            with contextlib.closing(batches):
                found = self._read_from(held, index, batches, has_own_window=has_own_window)
            if found is None:
                return
            length, index = found
        with self._changed:
            held.reading_since_s = None
            held.length = length
            self._ended.append([held.number, length])
            self._hand_out()
            self._changed.notify_all()
        threading.Thread(target=self._report_when_done, args=(held,), daemon=True).start()

    def _read_from(
        self, held: HeldSplit, index: int, batches: Generator[Any], *, has_own_window: bool
    ) -> tuple[int, int | None] | None:
        """Reads a split up to its end, or to a batch that is skipped.

        Returns the length of the split so far, and where to begin again; None if it is not wanted
        any more.
        """
        while True:
            since_s = time.monotonic()
            with self._changed:
                held.reading_since_s = since_s
                is_compressed = self._wishes.is_compressed
            try:
                message = held.next_message(batches, index, is_compressed=is_compressed)
            except Exception as error:  # noqa: BLE001 - sent to the consumers
                if not self._fail(held, index, error):
                    return None
                # Other sources cannot be opened behind the batch.
                can_seek = facts_of(self._source).can_seek
                return (index + 1, index + 1) if can_seek else (index, None)
            if message is None:
                return index, None
            self._counts.add(time.monotonic() - since_s)
            with self._changed:
                held.reading_since_s = None
                if index not in held.received and not self._add(
                    held, index, message, has_own_window=has_own_window
                ):
                    return None
            index += 1

    def _add(self, held: HeldSplit, index: int, message: Message, *, has_own_window: bool) -> bool:
        """Adds a batch once there is room; returns False if the split is not wanted any more."""
        self._num_blocked += 1
        self._changed.wait_for(
            lambda: self._has_room(held, has_own_window) or self._is_unwanted(held)
        )
        self._num_blocked -= 1
        if self._is_unwanted(held):
            return False
        batch = PackedBatch(held, index, message)
        if self._shared is not None:  # The split is done once it is read: nobody confirms.
            self._shared.add(batch)
            self._hand_out()
            return True
        held.batches[index] = batch
        self._window_batches += 1
        self._window_bytes += batch.num_bytes
        if self._num_consumers is None:
            self._queue.append(batch)
        self._hand_out()
        return True

    def _has_room(self, held: HeldSplit, has_own_window: bool) -> bool:
        if self._shared is not None:
            return self._shared.has_room
        most = max(self._limits.most_batches, 2 * (self._num_consumers or 1))
        # Batches of later splits may fill the window of all.
        if has_own_window or any(split == held.number for split, *_ in self._waiting_for):
            return len(held.batches) < most
        is_small = self._window_batches < most and self._window_bytes < self._limits.most_bytes
        return not self._window_batches or is_small

    def _is_unwanted(self, held: HeldSplit) -> bool:
        return held.is_revoked or self._is_over

    def _report_when_done(self, held: HeldSplit) -> None:
        """Reports a split to the dispatcher once all its batches have arrived."""
        with self._changed:
            self._changed.wait_for(
                lambda: held.is_done(self._num_consumers) or self._is_unwanted(held)
            )
            if self._is_unwanted(held):
                return
        if self._reports.done(held.number, held.attempt):
            with self._changed:
                self._held.pop(held.number, None)
                self._hand_out()

    def _fail(self, held: HeldSplit, index: int, error: Exception) -> bool:
        """Reports an error to the dispatcher; returns True if the batch is skipped.

        If none may be, the batches before it arrive first.
        """
        with self._changed:
            held.reading_since_s = None
            self._changed.wait_for(
                lambda: not held.batches or self._may_skip or self._is_unwanted(held)
            )
            if self._is_unwanted(held):
                return False
        described = describe_read_error(
            error, self._source, self._plan, epoch=self._epoch, split=held.number, index=index
        )
        return self._reports.failed({**described, "attempt": held.attempt})
