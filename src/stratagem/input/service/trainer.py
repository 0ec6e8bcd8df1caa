"""`EpochReading`: one epoch of a dataset that input workers read, in the trainer.

The trainer owns the position. An epoch is a plan of splits in L lanes: lane l has its splits l,
l + L, l + 2L and so on, and batches come from the lanes in turn. So the order follows from the plan
and L, and the position is a split and a number for each lane. A few threads ask workers for the
next batches. Which worker answers changes nothing: a request whose worker is lost or stuck goes to
another one.

Several consumers divide an epoch by arithmetic, too: consumer c of C has the splits c, c + C and so
on. If there are fewer splits than consumers, or in coordinated reads, each has the batches c, c + C
and so on of each split.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import hashlib
import threading
import time
import uuid
import warnings
from typing import Any

import numpy as np

from stratagem import settings
from stratagem.errors import UnavailableError, explain, invalid
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.shared_memory import MemoryLimits
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import (
    AUTO,
    ZSTD,
    is_available,
    unpack_batch,
)
from stratagem.input.service.address_book import BookClient, service_keys
from stratagem.input.service.splits import (
    ShardingPolicy,
    SourceFacts,
    SplitPlan,
    plan_splits,
)
from stratagem.input.service.workers import read_error, skip_warning
from stratagem.resources import Closing


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """Checked options of `distribute`: what a consumer reads of an epoch, and how.

    `index` and `count` are of the consumer. `in_rounds` are coordinated reads.
    """

    policy: ShardingPolicy
    index: int = 0
    count: int = 1
    in_rounds: bool = False
    most_ahead: int | None = None
    is_exact: bool = False
    skip_errors: int = 0


@dataclasses.dataclass(frozen=True)
class SentDataset:
    """A dataset as it is sent to workers. `name` follows from the pickled source."""

    name: str
    pickled: np.ndarray
    facts: SourceFacts
    compression: str | None

    @classmethod
    def named(cls, pickled: np.ndarray, facts: SourceFacts, compression: str | None) -> SentDataset:
        """Returns a dataset with the name of its contents, the same in all processes."""
        return cls(hashlib.sha256(pickled.data).hexdigest(), pickled, facts, compression)


class _Reading:
    """A split that workers read for this consumer: `address` does, those to `avoid` have failed.

    `run` names the reading of data that may differ in another one. Until `has_any` batch of it has
    come, another worker may begin anew.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.num_open = 0  # requests, in a thread each
        self.avoid: set[str] = set()
        self.run = uuid.uuid4().hex
        self.has_any = False

    def lose(self, address: str) -> None:
        """Notes that a worker has failed."""
        if address not in self.avoid:
            self.avoid.add(address)
            if not self.has_any:
                self.run = uuid.uuid4().hex


class _Place:
    """The `number`th batch of this consumer in a split: asked for, and `is_ready` once it came."""

    def __init__(self, reading: _Reading, split: int, number: int) -> None:
        self.reading = reading
        self.split = split
        self.number = number
        self.batch: Any = None
        self.error: Exception | None = None
        self.is_ready = False


class _Lane:
    """Splits that are read one after the other.

    `split` and `number` are those of the next request, `taken` those of the next batch to return.
    """

    def __init__(self, split: int, number: int) -> None:
        self.taken = [split, number]
        self.places: collections.deque[_Place] = collections.deque()
        self.go_to(split, number)

    def go_to(self, split: int, number: int = 0) -> None:
        """Goes on with a split."""
        self.split, self.number = split, number
        self.reading = _Reading()

    def ask(self) -> _Place:
        """Returns the next place, which is in the lane from now on."""
        place = _Place(self.reading, self.split, self.number)
        self.places.append(place)
        self.number += 1
        self.reading.num_open += 1
        return place


_POLL_S, _FIRST_POLL_S = 0.5, 0.05
_LOOK_S, _AGAIN_S = 2.0, 0.05
_LEAST_PATIENCE_S = 30.0  # without any worker: one that is restarted may need as long
# On one machine, batches of up to this size go by shared memory. A consumer that has more of them
# than there is room for, fetched ahead and in use, gets the rest by a socket.
_MOST_SHARED_BYTES = 2**28
_LEAST_BATCHES, _BATCHES_IN_USE = 8, 4


class _Workers(Closing):
    """Connections to the workers that the dispatcher lists, or listed when it last answered."""

    def __init__(
        self, service: str, trainer: str, most_ahead: int | None, known: dict[str, Any]
    ) -> None:
        self._trainer, self._known = trainer, known
        num_batches = max(_LEAST_BATCHES, (most_ahead or 0) + _BATCHES_IN_USE)
        self._limits = MemoryLimits(_MOST_SHARED_BYTES, num_batches)
        self._silence_s = float(settings.read("peer_timeout_s"))
        self._book = BookClient(service)
        self._changed = threading.Condition()
        self._readers: list[str] = []
        self._book_error: Exception | None = None
        self._has_asked = False
        self._connections: dict[str, Connections] = {}
        self._away_until_s: dict[str, float] = {}
        self._heard_s = 0.0
        self._is_closed = False
        self._watching = threading.Thread(
            target=self._watch, name="stratagem-input-workers", daemon=True
        )
        self._watching.start()

    def _watch(self) -> None:
        limit_s = None
        if self._known:  # from the last epoch: the dispatcher may be gone since
            self._follow(self._known)
            limit_s = _LOOK_S
        while not self._is_closed:
            error = None
            try:
                self._known.update(self._book.ask("readers", limit_s=limit_s).fields)
                self._follow(self._known)
            except Exception as caught:  # noqa: BLE001 - raised if there is no worker
                error = caught
            with self._changed:
                self._has_asked, self._book_error = True, error
                self._changed.notify_all()
                interval_s = _POLL_S if self._connections else _FIRST_POLL_S
                self._changed.wait_for(lambda: self._is_closed, interval_s)

    def _follow(self, listed: dict[str, Any]) -> None:
        addresses = {*listed["readers"]}
        with self._changed:
            if self._is_closed:
                return
            self._readers = listed["readers"]
            lost = [self._connections.pop(one) for one in {*self._connections} - addresses]
            for address in addresses - {*self._connections}:
                self._away_until_s.pop(address, None)
                self._connections[address] = Connections(
                    service_keys(address.partition(" ")[0]),
                    [address],
                    peers="Input worker",
                    memory_limits=self._limits,
                )
        for connections in lost:
            connections.abandon(0, "the dispatcher has given it up")
            connections.close()

    def listed(self) -> dict[str, Any]:
        """Returns the list of the dispatcher once it has a worker, or the last one if it is gone.

        Raises UnavailableError if there is none.
        """
        since_s = time.monotonic()
        with self._changed:
            while not (self._has_asked and self._connections):
                if self._book_error is not None and not self._connections:
                    # A copy, as in `EpochReading.next`.
                    raise copy.copy(self._book_error)
                self.require(since_s)
                self._changed.wait(_FIRST_POLL_S)
            return {**self._known}

    def require(self, since_s: float) -> None:
        """Raises UnavailableError if no worker has answered for too long, `since_s` or later."""
        patience_s = max(2 * self._silence_s, _LEAST_PATIENCE_S)
        waited_s = time.monotonic() - max(since_s, self._heard_s)
        if waited_s < patience_s:
            return
        known = sorted(self._connections)
        raise UnavailableError(
            explain(
                f"The dispatcher at {self._book.target} has had no input worker "
                f"{f'that answers (of {known}) ' if known else ''}for {waited_s:.0f} s.",
                expected="at least one worker that joins.",
                fix="start WorkerServer(WorkerConfig(dispatcher_address=...)), or see the logs "
                "of the workers for why they ended. To wait longer, set STRATAGEM_PEER_TIMEOUT_S.",
                code="SG602",
            )
        )

    def choose(self, split: int, reading: _Reading) -> str | None:
        """Returns the worker that reads a split, None if there is none.

        A new reading gets the same worker for all consumers, as long as the list is the same. It
        stays there: another worker may have to read through what was returned.
        """
        with self._changed:
            readers = self._readers
            now_s = time.monotonic()
            found = [
                (
                    address in reading.avoid,
                    now_s < self._away_until_s.get(address, 0.0),
                    address != reading.address,
                    place,
                )
                for place in range(len(readers))
                if (address := readers[(split + place) % len(readers)]) in self._connections
            ]
            if not found:
                return None
            reading.address = readers[(split + min(found)[-1]) % len(readers)]
            return reading.address

    def ask(self, address: str, message: Message) -> Message | None:
        """Returns the answer of a worker, None if it is lost."""
        with self._changed:
            connections = self._connections.get(address)
        if connections is None:
            return None
        try:
            answer = connections.ask(0, message)
        except (UnavailableError, ServerError):
            with self._changed:
                self._away_until_s[address] = time.monotonic() + self._silence_s
            return None
        self._heard_s = time.monotonic()
        return answer

    def wants_compression(self, address: str, compression: str | None) -> bool:
        """Returns True if a worker compresses batches: "AUTO" does so on other machines."""
        if compression != AUTO:
            return compression == ZSTD
        with self._changed:
            connections = self._connections.get(address)
        return connections is not None and connections.is_far(0) and is_available()

    def close(self) -> None:
        """Lets the workers close what they read for this trainer, and closes the connections."""
        with self._changed:
            self._is_closed = True
            open_now, self._connections = self._connections, {}
            self._changed.notify_all()
        for address, connections in open_now.items():
            if time.monotonic() >= self._away_until_s.get(address, 0.0):
                with contextlib.suppress(UnavailableError, ServerError):
                    connections.ask(0, Message("close", {"trainer": self._trainer}), timeout_s=1.0)
            connections.close()
        self._book.close()  # ends a question of the thread, too
        self._watching.join()


_LEAST_AHEAD, _AHEAD_PER_LANE = 4, 2
_MOST_THREADS = 16
# So far workers read ahead of a request.
_READ_AHEAD = 8
# In coordinated reads, consumers agree on the order without talking: whatever workers there are.
_LANES_IN_ROUNDS = 8
_MOST_LOSSES = 8
# Answers after which a batch is asked for again: a worker may have been started again since it got
# the dataset.
_UNDECIDED = {"wait", "unknown"}


class EpochReading(Closing):
    """One epoch of a consumer: asks workers for batches ahead, and returns them in order.

    Args:
        service: address of the dispatcher.
        dataset: what is read.
        wanted: the share of this consumer.
        epoch: number of the epoch.
        state: position to resume from, None for the start.
        known: the last list of workers, which is renewed.

    Raises:
        UnavailableError: there is no worker.
        ValueError: the data do not fit the request, or the state is of another consumer.
    """

    def __init__(
        self,
        service: str,
        dataset: SentDataset,
        wanted: ReadRequest,
        epoch: int,
        state: dict[str, Any] | None,
        known: dict[str, Any],
    ) -> None:
        self._dataset, self._wanted, self._epoch = dataset, wanted, epoch
        self._trainer = uuid.uuid4().hex
        self._workers = _Workers(service, self._trainer, wanted.most_ahead, known)
        try:
            self._begin(state)
        except BaseException:
            self._workers.close()
            raise
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._may_skip = wanted.skip_errors
        self._warnings: list[str] = []
        self._lost: set[int] = set()
        # Splits and runs, by their worker, which does not know yet that all of them has come.
        self._taken: dict[str | None, list[tuple[int, str | None]]] = {}
        self._is_closed = False
        for _ in range(max(2, min(_MOST_THREADS, self._num_lanes))):
            threading.Thread(target=self._work, name="stratagem-input-fetch", daemon=True).start()

    def _begin(self, state: dict[str, Any] | None) -> None:
        wanted, facts = self._wanted, self._dataset.facts
        if state is None:
            self._plan, self._num_lanes = self._planned()
        else:
            if state["consumer"] != [wanted.index, wanted.count]:
                raise invalid(
                    f"A position of consumer {state['consumer'][0]} of {state['consumer'][1]} "
                    f"was restored by consumer {wanted.index} of {wanted.count}.",
                    expected="the same consumer: another one has other batches.",
                    fix="resume with as many processes, each from its own state; or begin the "
                    "epoch again.",
                )
            self._plan, self._num_lanes = SplitPlan(*state["plan"]), state["num_lanes"]
        count = self._plan.count
        is_divided = wanted.in_rounds or (count is not None and count < wanted.count)
        self._stride, self._offset = (wanted.count, wanted.index) if is_divided else (1, 0)
        if is_divided and not facts.is_repeatable:
            raise invalid(
                f"{wanted.count} consumers would divide the batches of one reading, and the "
                "data may have other batches when they are read again.",
                expected="sg.input.Dataset of arrays, files or a function, or a Grain dataset.",
                fix="make the dataset of one of these, or read it without input workers.",
            )
        first, step = (0, 1) if is_divided else (wanted.index, wanted.count)
        self._step = step * self._num_lanes
        lanes = [[first + lane * step, 0] for lane in range(self._num_lanes)]
        self._lanes = [_Lane(*one) for one in (lanes if state is None else state["lanes"])]
        self._turn = 0 if state is None else state["turn"]

    def _planned(self) -> tuple[SplitPlan, int]:
        """Returns the plan of a new epoch, and its number of lanes."""
        wanted, facts, listed = self._wanted, self._dataset.facts, self._workers.listed()
        if wanted.in_rounds:
            num_lanes = _LANES_IN_ROUNDS
        else:
            num_lanes = max(len(listed["readers"]), listed["num_expected"])
        group = wanted.count if wanted.in_rounds else None
        plan = plan_splits(facts, wanted.policy, num_lanes, group=group)
        return plan, num_lanes if plan.count is None else max(1, min(num_lanes, plan.count))

    # The consumer.

    def next(self) -> Any:
        """Returns the next batch; raises StopIteration at the end."""
        with self._changed:
            while self._lanes and not self._is_closed:
                self._warn()
                lane = self._lanes[self._turn]
                if lane.places and (error := lane.places[0].error) is not None:
                    # Each call raises a copy: the traceback of the kept one would keep the reader.
                    raise copy.copy(error)
                if lane.places and lane.places[0].is_ready:
                    return self._take(lane)
                if not lane.places and self._has_ended(lane):
                    self._lanes.pop(self._turn)
                    self._turn %= max(1, len(self._lanes))
                    continue
                self._changed.wait()
            self._warn()
            if self._lost:
                text = _lost_warning(len(self._lost))
                self._lost.clear()
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            raise StopIteration

    def _take(self, lane: _Lane) -> Any:
        place = lane.places.popleft()
        lane.taken = [place.split, place.number + 1]
        self._turn = (self._turn + 1) % len(self._lanes)
        self._changed.notify_all()
        return place.batch

    def _warn(self) -> None:
        while self._warnings:
            warnings.warn(self._warnings.pop(0), RuntimeWarning, stacklevel=5)

    def _has_ended(self, lane: _Lane) -> bool:
        return self._plan.count is not None and lane.split >= self._plan.count

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch that was returned, as JSON."""
        with self._changed:
            return {
                "consumer": [self._wanted.index, self._wanted.count],
                "plan": [*dataclasses.astuple(self._plan)],
                "num_lanes": self._num_lanes,
                "lanes": [[*lane.taken] for lane in self._lanes],
                "turn": self._turn,
            }

    def close(self) -> None:
        """Ends the threads; batches that were not returned are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._workers.close()

    # The threads that fetch.

    def _work(self) -> None:
        while (claimed := self._claim()) is not None:
            lane, place = claimed
            try:
                self._fetch(lane, place)
            except Exception as error:  # noqa: BLE001 - raised by `next`
                with self._changed:
                    place.error = error
                    self._changed.notify_all()
            with self._changed:
                self._note_taken(lane, place)

    def _claim(self) -> tuple[_Lane, _Place] | None:
        """Returns the next batch to ask for, once there is room; None once this is closed."""
        with self._changed:
            while not self._is_closed:
                lane = self._next_lane()
                if lane is not None:
                    return lane, lane.ask()
                self._changed.wait()
            return None

    def _note_taken(self, lane: _Lane, place: _Place) -> None:
        """Notes that a request has ended: after the last one of a split, its worker may forget."""
        reading = place.reading
        reading.num_open -= 1
        # Other consumers of the split may be behind.
        if reading.num_open or lane.reading is reading or self._stride > 1:
            return
        run = None if self._dataset.facts.is_repeatable else reading.run
        self._taken.setdefault(reading.address, []).append((place.split, run))

    def _next_lane(self) -> _Lane | None:
        """Returns the lane whose next batch is returned first of those that are not asked for."""
        count = len(self._lanes)
        num_ahead = sum(len(lane.places) for lane in self._lanes)
        most_ahead = self._wanted.most_ahead or max(_LEAST_AHEAD, _AHEAD_PER_LANE * count)
        found: tuple[int, _Lane] | None = None
        for place in range(count):
            lane = self._lanes[(self._turn + place) % count]
            rank = len(lane.places) * count + place
            if not self._has_ended(lane) and (found is None or rank < found[0]):
                found = rank, lane
        # The lane that comes next may always ask: others may have all the room.
        return found[1] if found and (num_ahead < most_ahead or found[0] == 0) else None

    def _fetch(self, lane: _Lane, place: _Place) -> None:
        """Asks workers until one answers with a batch, the end of the split, or an error."""
        reading, num_losses, asked_s = place.reading, 0, time.monotonic()
        progress, progress_s = None, asked_s
        while True:
            address = self._workers.choose(place.split, reading)
            with self._changed:
                if self._is_closed or place not in lane.places:
                    return
                fields = self._fields(lane, place)
                fields["taken"] = self._taken.pop(address, [])
            if address is None:
                self._workers.require(asked_s)
                time.sleep(_AGAIN_S)
                continue
            compression = self._dataset.compression
            fields["is_compressed"] = self._workers.wants_compression(address, compression)
            message = Message("batch", fields)
            answer = self._workers.ask(address, message)
            if answer is not None and answer.kind == "unknown":
                answer = self._send_dataset(address, message)
            if answer is not None and answer.kind not in _UNDECIDED:
                batch = unpack_batch(answer) if "structure" in answer.fields else None
                with self._changed:
                    if self._is_closed:  # nobody would wake it
                        return
                    if fields["run"] not in (None, reading.run):
                        continue  # It is from a reading that was given up.
                    if self._waits_for_others(lane, place, answer):
                        self._changed.wait()
                        continue
                    self._note(lane, place, answer, batch)
                    self._changed.notify_all()
                return
            now_s = time.monotonic()
            if answer is not None:
                seen = address, answer.fields.get("num_steps")
                if seen != progress:
                    progress, progress_s = seen, now_s
                if now_s < progress_s + settings.read("stuck_timeout_s"):
                    continue
            # It is lost, or stuck in a read: another one reads the rest of the split.
            num_losses, progress_s = num_losses + 1, now_s
            with self._changed:
                if self._is_closed:
                    return
                reading.lose(address)
            self._workers.require(asked_s)
            if num_losses >= _MOST_LOSSES:
                raise UnavailableError(_losses(place.split, num_losses))

    def _fields(self, lane: _Lane, place: _Place) -> dict[str, Any]:
        stride, number = self._stride, place.number
        wanted = [
            one.number for one in lane.places if one.split == place.split and not one.is_ready
        ]
        keep = min(wanted, default=number) * stride
        facts = self._dataset.facts
        return {
            "dataset": self._dataset.name,
            "plan": [*dataclasses.astuple(self._plan)],
            "epoch": self._epoch,
            "split": place.split,
            "index": number * stride + self._offset,
            "from": number * stride,
            "is_round": self._wanted.in_rounds,
            "keep": keep,
            # Other consumers may be behind by so much.
            "behind": 0 if stride == 1 else _READ_AHEAD * stride,
            "ahead": max(_READ_AHEAD, _AHEAD_PER_LANE * stride),
            # To know it, a worker might have to open all files.
            "can_seek": facts.can_seek,
            "run": None if facts.is_repeatable else place.reading.run,
            "is_new": not place.reading.has_any,
            "trainer": self._trainer,
        }

    def _send_dataset(self, address: str, message: Message) -> Message | None:
        """Sends the dataset, unless another thread has by now; returns the answer to a request."""
        with self._sending:
            answer = self._workers.ask(address, message)
            if answer is None or answer.kind != "unknown":
                return answer
            fields = {"dataset": self._dataset.name}
            sent = Message("dataset", fields, (self._dataset.pickled,))
            answer = self._workers.ask(address, sent)
            if answer is None or answer.kind == "failed":
                return answer
        return self._workers.ask(address, message)

    def _waits_for_others(self, lane: _Lane, place: _Place, answer: Message) -> bool:
        """Returns True for an error that is perhaps that of an earlier batch, which counts once."""
        return answer.kind == "failed" and any(
            one.split == place.split and one.number < place.number and not one.is_ready
            for one in lane.places
        )

    def _note(self, lane: _Lane, place: _Place, answer: Message, batch: Any) -> None:
        """Notes the answer for a place, which may have been dropped since."""
        if place not in lane.places:
            return
        if "structure" in answer.fields:
            place.batch, place.is_ready, place.reading.has_any = batch, True, True
            return
        if answer.kind == "failed":
            described = answer.fields["error"]
            if described["kind"] == "open" or not self._may_skip:
                place.error = read_error(described)
                return
            self._may_skip -= 1
            self._warnings.append(skip_warning(described))
            if self._dataset.facts.can_seek:  # Other sources cannot be opened behind the batch.
                lane.places.remove(place)
                return
        if answer.kind == "lost":
            self._lost.add(place.split)
        assert answer.kind in {"lost", "end", "failed"}  # the split ends here
        for one in [*lane.places]:
            if one.split == place.split and one.number >= place.number:
                lane.places.remove(one)
        if lane.split == place.split:
            lane.go_to(place.split + self._step)


def _lost_warning(count: int) -> str:
    return explain(
        f"The rest of {count} splits was lost with their input workers.",
        expected="a dataset whose splits have the same batches when they are read again.",
        fix="nothing, if each example may be missed once. Else pass exactly_once=True, which names "
        "what the dataset lacks.",
    )


def _losses(split: int, count: int) -> str:
    return explain(
        f"The input workers that read split {split} were lost or stuck {count} times in a row, "
        "before the next batch of it arrived.",
        expected="workers that survive reading it.",
        fix="see the ends of their logs: a worker may be out of memory, or a function of the "
        "dataset may never return. To wait longer for a batch, set STRATAGEM_STUCK_TIMEOUT_S.",
    )
