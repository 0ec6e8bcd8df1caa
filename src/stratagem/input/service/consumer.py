"""A consumer of one epoch of a job: follows the dispatcher's news and fetches batches ahead.

A batch of a split that was lost since is refused, because another worker reads it again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from stratagem.errors import (
    InvalidArgumentError,
    NotFoundError,
    PoisonExampleError,
    UnavailableError,
    explain,
)
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import unpack_batch
from stratagem.input.service.dispatcher import service_keys, tcp_address
from stratagem.input.service.job import EVERY_NUMBER, NumberRanges
from stratagem.input.service.job_requests import JobRequest
from stratagem.input.service.splits import SplitPlan, file_of_split
from stratagem.input.sources.source import Source
from stratagem.resources import Closing

# Requests to a dispatcher.

_REFUSALS: dict[str, type[Exception]] = {
    "InvalidArgumentError": InvalidArgumentError,
    "NotFoundError": NotFoundError,
    "UnavailableError": UnavailableError,
    "ValueError": ValueError,
}


class ServiceClient(Closing):
    """A connection to a dispatcher; thread-safe. `address` is with or without `tcp://`."""

    def __init__(self, address: str) -> None:
        self.target = tcp_address(address)
        self._connections = Connections(
            service_keys(self.target), [self.target], peers="Input dispatcher"
        )

    def ask(
        self,
        kind: str,
        arrays: tuple[np.ndarray, ...] = (),
        *,
        limit_s: float | None = None,
        **fields: Any,
    ) -> Message:
        """Returns the answer to a request; raises the error if it is refused."""
        answer = self._connections.ask(0, Message(kind, fields, arrays), timeout_s=limit_s)
        if answer.kind == "refused":
            raise _REFUSALS[answer.fields["kind"]](answer.fields["text"])
        return answer

    def close(self) -> None:
        """Closes the connection; threads that wait for an answer get an UnavailableError."""
        self._connections.close()


# Position of a consumer in a job: the batches that it has returned, as JSON.

# So many splits that coordinated reads are past are remembered with their batches. Consumers are
# never farther apart than workers read ahead.
_MOST_PASSED = 256


class ConsumerPosition:
    """Batches that a consumer has returned.

    A split whose batches were all returned by this consumer counts as done, so that the position
    stays small. In a job that several consumers share, it grows with the splits that they share.
    `cursor` is the place of coordinated reads.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.cursor: Any = None
        self._done, self._passed = NumberRanges(), NumberRanges()
        self._parts: dict[int, NumberRanges] = {}
        self._lengths: dict[int, int] = {}
        self._passed_parts: dict[int, NumberRanges] = {}  # oldest first
        if state is not None:
            self.cursor = state["cursor"]
            self._done = NumberRanges(state["done"])
            self._passed = NumberRanges(state["passed"])
            self._parts = {
                int(split): NumberRanges(ranges) for split, ranges in state["parts"].items()
            }

    def add(self, split: int, index: int) -> None:
        """Notes a batch that is returned."""
        self._parts.setdefault(split, NumberRanges()).add(index)
        self._compact(split)

    def note_length(self, split: int, length: int) -> None:
        """Notes the number of batches of a split."""
        self._lengths[split] = length
        self._compact(split)

    def _compact(self, split: int) -> None:
        length, part = self._lengths.get(split), self._parts.get(split)
        if length is not None and (len(part) if part else 0) == length:
            self._parts.pop(split, None)
            del self._lengths[split]
            self._done.add(split)

    def pass_split(self, split: int) -> None:
        """Notes that coordinated reads are past a split: others have its other batches."""
        self._passed.add(split)
        self._passed_parts[split] = self._parts.pop(split, NumberRanges())
        if len(self._passed_parts) > _MOST_PASSED:
            del self._passed_parts[next(iter(self._passed_parts))]
        self._lengths.pop(split, None)

    def numbers_of(self, split: int) -> NumberRanges:
        """Returns the batches of a split that were returned."""
        if split in self._done:
            return NumberRanges([EVERY_NUMBER])
        return self._parts.get(split) or self._passed_parts.get(split) or NumberRanges()

    def state(self, *, num_consumers: int, num_lanes: int | None) -> dict[str, Any]:
        """Returns the position as JSON."""
        return {
            "num_consumers": num_consumers,
            "num_lanes": num_lanes,
            "done": self._done.as_json(),
            "passed": self._passed.as_json(),
            "parts": {str(split): part.as_json() for split, part in self._parts.items()},
            "cursor": self.cursor,
        }


# Errors of reading a batch: where they happened, for the consumers of a job.

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def describe_read_error(
    error: Exception, source: Source, plan: SplitPlan, *, epoch: int, split: int, index: int
) -> dict[str, Any]:
    """Returns an error of reading a batch as JSON, with the file and the function that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_OWN_FOLDER) and _INSTALLED not in frame.filename
    ]
    place = (own or frames)[-1] if frames else None
    file = file_of_split(source, plan, split)
    return {
        "kind": "read",
        "split": split,
        "index": index,
        "epoch": epoch,
        "file": None if file is None else str(file),
        "function": place and place.name,
        "source_file": place and place.filename,
        "line": place and place.lineno,
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def describe_open_error(error: Exception) -> dict[str, Any]:
    """Returns an error of unpickling a dataset as JSON."""
    return {
        "kind": "open",
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def job_error(described: dict[str, Any]) -> Exception:
    """Returns the error of a job, for its consumers."""
    if described["kind"] == "losses":
        return UnavailableError(
            explain(
                f"The input workers that read split {described['split']} were lost "
                f"{described['count']} times in a row, before any batch of it arrived.",
                expected="workers that survive reading it.",
                fix="see the ends of their logs: a worker may be out of memory, or a function of "
                "the dataset may never return.",
            )
        )
    if described["kind"] == "journal":
        return UnavailableError(
            explain(
                f"The dispatcher cannot write its journal: {described['text']}",
                expected="a work_dir with room on its disk.",
                fix="make room, and start the dispatcher again with the same work_dir and port.",
            )
        )
    if described["kind"] == "open":
        return RuntimeError(
            explain(
                f"An input worker could not load the dataset: {described['type']}: "
                f"{described['text']}",
                expected="a worker with the same modules as the process that registered it.",
                fix=f"install the modules there. The worker's traceback:\n{described['trace']}",
            )
        )
    return PoisonExampleError(
        explain(
            f"An input worker could not read {_place(described)}",
            expected="a dataset whose functions accept all examples.",
            fix=f"correct the example or the function, or pass skip_errors. The worker's "
            f"traceback:\n{described['trace']}",
            code="SG312",
        )
    )


def skip_warning(described: dict[str, Any]) -> str:
    """Returns the warning of a batch that was skipped."""
    return explain(
        f"An input worker skipped {_place(described)}",
        expected="a dataset whose functions accept all examples.",
        fix="nothing, if this example may be missed. Else correct it or the function.",
    )


def _place(described: dict[str, Any]) -> str:
    where = f"batch {described['index']} of split {described['split']}"
    if described["file"] is not None:
        where = f"batch {described['index']} of the file {described['file']}"
    place = f"{described['function']} ({described['source_file']}, line {described['line']})"
    return (
        f"{where} in epoch {described['epoch']}: {place} raised {described['type']}: "
        f"{described['text']}"
    )


_LEAST_AHEAD, _AHEAD_PER_WORKER = 4, 2
# Part of the limit on silence after which a consumer that hears nothing returns no batch: the
# dispatcher may have given it up, and others may read the batch again.
_LEASE = 0.7
_POLL_S = 0.2
LEAST_PATIENCE_S = 30.0  # without any worker: one that is restarted may need as long
_LEAVE_S = 2.0


@dataclasses.dataclass(frozen=True)
class ReceivedBatch:
    """A batch that waits to be returned; in coordinated reads, with the place after it.

    A batch without an index has no rows, and keeps consumers in step. `passed` are splits that end
    before it.
    """

    split: int
    index: int | None
    batch: Any
    cursor: Any = None
    passed: tuple[int, ...] = ()


class JobConsumer:
    """Joins a job, and fetches batches ahead in threads.

    Args:
        client: connection to the dispatcher.
        wanted: the job.
        epoch: the epoch of the job.
        state: position to resume from.

    Raises:
        UnavailableError: the dispatcher does not answer.
        ValueError: the dispatcher refuses the job.
    """

    def __init__(
        self,
        client: ServiceClient,
        wanted: JobRequest,
        epoch: int,
        state: dict[str, Any] | None,
    ) -> None:
        self.name = uuid.uuid4().hex
        self.wanted = wanted
        self._is_coordinated = wanted.num_consumers is not None
        self.client = client
        self.position = ConsumerPosition(state)
        self.changed = threading.Condition()
        self.is_closed = False
        self.returned: tuple[int, int | None] | None = None  # split and index of the last batch
        self._queue: collections.deque[ReceivedBatch] = collections.deque()
        self._num_ahead = 0  # in the queue, or asked for
        self._attempts: dict[int, int] = {}
        self._view: dict[str, Any] = {"workers": {}, "num_consumers": 1, "is_finished": False}
        self._error: Exception | None = None
        self._has_all = False  # coordinated reads have reached the end
        self._num_warned = self._num_returned = 0
        self._wait_s = 0.0
        self._began_s = time.monotonic()
        answer = client.ask(
            "join",
            consumer=self.name,
            job=wanted.job or self.name,
            is_named=wanted.job is not None,
            epoch=epoch,
            dataset_id=wanted.dataset_id,
            policy=wanted.policy,
            num_consumers=wanted.num_consumers,
            is_exact=wanted.is_exact,
            is_shared=wanted.trainer is not None,
            skip_errors=wanted.skip_errors,
            # Others continue while a trainer resumes, which has no place of its own in the window.
            state=None if wanted.trainer is not None else state,
        )
        self.run: str = answer.fields["run"]
        self.num_joined: int = answer.fields["num_joined"]
        self.num_lanes: int = answer.fields["num_lanes"]
        self.num_splits: int | None = answer.fields["num_splits"]
        self._silence_s: float = answer.fields["silence_s"]
        self._heard_s = self._had_workers_s = time.monotonic()

    def start(self, follow: Callable[[dict[str, str]], None]) -> None:
        """Starts to follow the news; `follow` gets the addresses of the workers each time."""
        threading.Thread(
            target=self._watch, args=(follow,), name="input consumer", daemon=True
        ).start()

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch that was returned."""
        with self.changed:
            return self.position.state(
                num_consumers=self.wanted.num_consumers or self._view["num_consumers"],
                num_lanes=self.num_lanes if self._is_coordinated else None,
            )

    def next(self) -> Any:
        """Returns the next batch; raises StopIteration at the end."""
        with self.changed:
            while True:
                if self.is_closed:
                    raise StopIteration
                self._warn_of_skipped()
                is_sure = time.monotonic() < self._heard_s + _LEASE * self._silence_s
                if self._queue and is_sure:
                    return self._take()
                if not self._queue:
                    if self._error is not None:
                        raise self._error
                    if self._has_all or (self._view["is_finished"] and not self._is_coordinated):
                        self._end()
                        raise StopIteration
                    self._require_workers()
                elif self._error is not None and not is_sure:
                    raise self._error
                since_s = time.monotonic()
                self.changed.wait(_POLL_S)
                self._wait_s += time.monotonic() - since_s

    def _take(self) -> Any:
        received = self._queue.popleft()
        self._num_ahead -= 1
        self._num_returned += 1
        for split in received.passed:
            self.position.pass_split(split)
        self.position.cursor = received.cursor
        self.returned = received.split, received.index
        if received.index is not None:
            self.position.add(received.split, received.index)
        self.changed.notify_all()
        return received.batch

    def _warn_of_skipped(self) -> None:
        skipped = self._view.get("skipped", [])
        for described in skipped[self._num_warned :]:
            self._num_warned += 1
            warnings.warn(skip_warning(described), RuntimeWarning, stacklevel=2)

    def _end(self) -> None:
        lost = self._view.get("num_lost", 0)
        if lost:
            warnings.warn(
                explain(
                    f"The rest of {lost} splits was lost with their input workers.",
                    expected="a dataset whose splits have the same batches when they are read "
                    "again, and consumers that are not lost at the same time.",
                    fix="nothing, if each example may be missed once. Else pass "
                    "exactly_once=True, which names what the dataset lacks.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )

    def _require_workers(self) -> None:
        now_s = time.monotonic()
        if self._view["workers"]:
            self._had_workers_s = now_s
        elif now_s > self._had_workers_s + max(2 * self._silence_s, LEAST_PATIENCE_S):
            raise UnavailableError(
                explain(
                    f"The dispatcher at {self.client.target} has had no input worker for "
                    f"{now_s - self._had_workers_s:.0f} s.",
                    expected="at least one worker that joins.",
                    fix="start WorkerServer(WorkerConfig(dispatcher_address=...)), or see the logs "
                    "of the workers for why they ended.",
                    code="SG602",
                )
            )

    # For the threads that fetch.

    def reserve(self, part: Callable[[], float] = lambda: 1.0, *, waits: bool = True) -> bool:
        """Waits until one more batch may be fetched; returns False once the consumer is closed.

        `part` returns the part of the batches ahead beyond which the caller waits. Without `waits`,
        the result is False in place of waiting.
        """

        def may_fetch() -> bool:
            return self._num_ahead < max(1, part() * self._most_ahead())

        with self.changed:
            if not waits and (self.is_closed or not may_fetch()):
                return False
            self.changed.wait_for(lambda: self.is_closed or may_fetch())
            self._num_ahead += 1
            return not self.is_closed

    def _most_ahead(self) -> int:
        if self.wanted.most_ahead is not None:
            return self.wanted.most_ahead
        return max(_LEAST_AHEAD, _AHEAD_PER_WORKER * len(self._view["workers"]))

    def give_back(self) -> None:
        """Ends a reservation without a batch."""
        with self.changed:
            self._num_ahead -= 1
            self.changed.notify_all()

    def put(self, message: Message, cursor: Any = None, passed: tuple[int, ...] = ()) -> bool:
        """Adds a batch; returns False if its split was lost after the batch was sent."""
        fields = message.fields
        batch = unpack_batch(message)
        with self.changed:
            for split, length in fields.get("ended", ()):
                self.position.note_length(split, length)
            split, index = fields["split"], fields["index"]
            is_current = fields["attempt"] >= self._attempts.get(split, 0) and not self.is_closed
            if is_current:
                self._queue.append(ReceivedBatch(split, index, batch, cursor, passed))
            else:
                self._num_ahead -= 1
            self.changed.notify_all()
            return is_current

    def put_empty(self, message: Message, split: int, cursor: Any, passed: tuple[int, ...]) -> None:
        """Adds a batch without rows."""
        with self.changed:
            received = ReceivedBatch(split, None, unpack_batch(message), cursor, passed)
            self._queue.append(received)
            self.changed.notify_all()

    def end_all(self) -> None:
        """Notes that there are no more batches."""
        with self.changed:
            self._has_all = True
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Stores an error, raised once the batches before it are returned."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    # News.

    def _watch(self, follow: Callable[[dict[str, str]], None]) -> None:
        seen = 0
        try:
            while not self.is_closed:
                load = {
                    "num_batches": self._num_returned,
                    "wait_s": self._wait_s,
                    "age_s": time.monotonic() - self._began_s,
                }
                answer = self.client.ask(
                    "watch_consumer", run=self.run, consumer=self.name, seen=seen, load=load
                )
                with self.changed:
                    self._heard_s = time.monotonic()
                    self.changed.notify_all()
                if answer.kind == "view":
                    seen = answer.fields["checksum"]
                    if not self._update(answer.fields["view"]):
                        return
                follow(self._view["workers"])
        except (UnavailableError, ServerError) as error:
            self.fail(error)

    def _update(self, view: dict[str, Any]) -> bool:
        """Carries out news; returns False after the last."""
        if "gone" in view:
            self.fail(_gone(view["gone"]))
            return False
        with self.changed:
            self._view = view
            if view["workers"]:
                self._had_workers_s = time.monotonic()
            if view["is_finished"]:
                self._heard_s = float("inf")  # Nothing is read again.
            for split, attempt in view["attempts"].items():
                self._attempts[int(split)] = attempt
            reports = [
                (int(split), attempt, self._numbers_of(int(split)).as_json())
                for split, attempt in view["awaited"].items()
            ]
            if view["error"] is not None:
                self._error = self._error or job_error(view["error"])
            self.changed.notify_all()
        for split, attempt, ranges in reports:
            self.client.ask(
                "report",
                run=self.run,
                reporter=self.name,
                split=split,
                attempt=attempt,
                ranges=ranges,
            )
        return not view["is_finished"] and view["error"] is None

    def _numbers_of(self, split: int) -> NumberRanges:
        """Returns the batches of a split that are here or were returned."""
        numbers = NumberRanges(self.position.numbers_of(split).as_json())
        for received in self._queue:
            if received.split == split and received.index is not None:
                numbers.add(received.index)
        return numbers

    def close(self) -> None:
        """Leaves the job; batches that were not returned are dropped."""
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            self._queue.clear()
            self.changed.notify_all()
        with contextlib.suppress(UnavailableError, ServerError):
            self.client.ask("leave", limit_s=_LEAVE_S, run=self.run, consumer=self.name)
        self.client.close()


def _gone(reason: str) -> UnavailableError:
    reasons = {
        "restored": "another consumer resumed the job from a state",
        "silent": "this consumer was silent for too long, and its batches are read elsewhere",
        "unknown": "the dispatcher was started again without its journal",
        "collected": "it had no consumers for too long",
        "left": "its only consumer left",
    }
    return UnavailableError(
        explain(
            f"The job of this consumer has ended at the dispatcher: {reasons[reason]}.",
            expected="a job that lasts as long as its consumers.",
            fix="resume all consumers from their last states. With fault_tolerant_mode and "
            "work_dir, a dispatcher that is started again continues.",
        )
    )
