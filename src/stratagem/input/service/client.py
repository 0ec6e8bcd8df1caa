"""`ServiceSource`: a dataset that input workers read; `ServiceReader` reads one epoch of a job."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.environment import load
from stratagem.errors import NotFoundError, UnavailableError, explain
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.shared_memory import MemoryLimits
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import AUTO, ZSTD, is_available
from stratagem.input.service.consumer import JobConsumer, ServiceClient
from stratagem.input.service.dispatcher import service_keys
from stratagem.input.service.job_requests import JobRequest
from stratagem.input.service.splits import (
    ShardingPolicy,
    facts_of,
    require_endless,
    require_hint,
    require_repeatable,
)
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Reader, Source
from stratagem.options import AutoShardPolicy

# Threads of a consumer that fetch batches from workers: as they come, or in rounds.

_AGAIN_S = 0.02
# On one machine, batches of up to this size go by shared memory. A consumer that has more of them
# than there is room for, fetched ahead and in use, gets the rest by a socket.
_MOST_SHARED_BYTES = 2**28
_LEAST_BATCHES, _BATCHES_IN_USE = 8, 4
_PART_OF_FAR = 0.5


class _Workers:
    """Connections to the live workers of a job, by name."""

    def __init__(self, consumer: JobConsumer) -> None:
        num_batches = (consumer.wanted.most_ahead or 0) + _BATCHES_IN_USE
        self._limits = MemoryLimits(_MOST_SHARED_BYTES, max(_LEAST_BATCHES, num_batches))
        self._lock = threading.Lock()
        self._connections: dict[str, Connections] = {}

    def keep(self, addresses: Mapping[str, str]) -> None:
        """Connects to new workers, and closes the connections to lost ones."""
        with self._lock:
            for name in addresses.keys() - self._connections.keys():
                address = addresses[name]
                self._connections[name] = Connections(
                    service_keys(address),
                    [address],
                    peers="Input worker",
                    memory_limits=self._limits,
                )
            lost = [
                self._connections.pop(name) for name in self._connections.keys() - addresses.keys()
            ]
        for connections in lost:
            connections.abandon(0, "the dispatcher has given it up")
            connections.close()

    def ask(self, name: str, message: Message) -> Message | None:
        """Returns the answer of a worker, None if the worker is lost."""
        with self._lock:
            connections = self._connections.get(name)
        try:
            return None if connections is None else connections.ask(0, message)
        except (UnavailableError, ServerError):
            return None

    def is_far(self, name: str) -> bool:
        """Returns True for a worker of another machine that has answered."""
        with self._lock:
            connections = self._connections.get(name)
        return connections is not None and connections.is_far(0)

    def compression_of(self, name: str) -> str | None:
        """Returns the compression that suits the link to a worker."""
        return ZSTD if self.is_far(name) and is_available() else None

    def has(self, name: str) -> bool:
        """Returns True for a live worker."""
        with self._lock:
            return name in self._connections


class FreeFetching:
    """Fetches from each worker in a thread, one batch after the other.

    While workers of this machine have batches, others fill only a part of those ahead, so that
    batches cross the network if the workers here are too slow.
    """

    def __init__(self, consumer: JobConsumer) -> None:
        self._consumer = consumer
        self._workers = _Workers(consumer)
        self._threads: dict[str, threading.Thread] = {}
        # Number of the next request to each worker. It outlives a thread, because a request without
        # an answer must be repeated: the worker takes the next number as a sign that it arrived.
        self._numbers: dict[str, int] = {}

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Starts threads for workers that are new or back, and ends those of lost ones."""
        self._workers.keep(addresses)
        for name in addresses:
            if name not in self._threads or not self._threads[name].is_alive():
                self._threads[name] = threading.Thread(
                    target=self._fetch, args=(name,), name="input fetch", daemon=True
                )
                self._threads[name].start()

    def close(self) -> None:
        """Ends all threads."""
        self._workers.keep({})

    def _fetch(self, worker: str) -> None:
        consumer, split = self._consumer, None
        while self._reserve(worker):
            number = self._numbers.setdefault(worker, 1)
            fields = {
                **self._identity(number),
                "num_joined": consumer.num_joined,
                "compression": self._workers.compression_of(worker),
                "trainer": consumer.wanted.trainer,
            }
            answer = self._workers.ask(worker, Message("next_batch", fields))
            if answer is not None and answer.kind == "batch":
                # A trainer of a shared window may miss batches of a split that it is past.
                former, split = split, answer.fields["split"]
                is_past = consumer.wanted.trainer is not None and former != split
                consumer.put(answer, passed=(former,) if is_past and former is not None else ())
                self._numbers[worker] = number + 1
                continue
            consumer.give_back()
            if answer is not None and answer.kind == "end":
                return
            if answer is None and not self._workers.has(worker):
                return
            time.sleep(_AGAIN_S)  # The job is about to begin there, or the connection was cut.

    def _identity(self, number: int) -> dict[str, Any]:
        """Returns the fields that identify a request of this consumer."""
        return {"run": self._consumer.run, "consumer": self._consumer.name, "number": number}

    def _reserve(self, worker: str) -> bool:
        """Waits until one more batch may be fetched; returns False once the consumer is closed.

        The next request confirms the last batch. It is confirmed at once if it must wait: other
        consumers may wait for the end of the job, and this one for them.
        """

        def part() -> float:
            return self._part_of(worker)

        if self._consumer.reserve(part, waits=False):
            return True
        if number := self._numbers.get(worker, 1) - 1:
            self._workers.ask(worker, Message("received", self._identity(number)))
        return self._consumer.reserve(part)

    def _part_of(self, worker: str) -> float:
        """Returns the part of the batches ahead that a worker may fill."""
        live = [name for name, thread in [*self._threads.items()] if thread.is_alive()]
        is_alone = all(self._workers.is_far(name) for name in live)
        return 1.0 if is_alone or not self._workers.is_far(worker) else _PART_OF_FAR


class RoundFetching:
    """Fetches the batches of one consumer of coordinated reads, in the order of rounds.

    Lane l has the splits l, l + n, l + 2n and so on for n lanes, and rounds take the lanes in turn.
    In a round, each consumer gets one batch of the same group of consecutive batches of a split. So
    consumers agree on the order without talking to each other.
    """

    def __init__(self, consumer: JobConsumer) -> None:
        self._consumer = consumer
        self._workers = _Workers(consumer)
        self._thread: threading.Thread | None = None
        num_lanes, cursor = consumer.num_lanes, consumer.position.cursor
        # The split and the group of each lane; lane of the next round.
        self._lanes: list[list[int]] = [[lane, 0] for lane in range(num_lanes)]
        self._turn = 0
        if cursor is not None:
            self._lanes, self._turn = [[*lane] for lane in cursor["lanes"]], cursor["turn"]
        self._passed: list[int] = []

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Starts the thread, and follows the workers."""
        self._workers.keep(addresses)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="input rounds", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._workers.keep({})

    def _run(self) -> None:
        consumer = self._consumer
        try:
            while self._lanes and consumer.reserve():
                if not self._next_round():
                    consumer.give_back()
            if not self._lanes:
                consumer.end_all()
        except (UnavailableError, ServerError) as error:
            consumer.fail(error)

    def _next_round(self) -> bool:
        """Fetches the batch of a round; returns False if there was none."""
        lane = self._lanes[self._turn]
        split, group = lane
        num_splits = self._consumer.num_splits
        if num_splits is not None and split >= num_splits:
            self._lanes.pop(self._turn)
            self._turn %= max(1, len(self._lanes))
            return False
        wanted = self._consumer.wanted
        assert wanted.num_consumers is not None
        assert wanted.consumer_index is not None
        first = group * wanted.num_consumers
        index = first + wanted.consumer_index
        answer, worker = self._batch_at(split, index)
        if answer is None:
            if worker is None:  # The split is done; else the worker was lost.
                self._pass(lane)
            return False
        if answer.kind == "batch":
            return self._put(answer, lane, worker)
        if first >= answer.fields["length"] or "structure" not in answer.fields:
            self._pass(lane)
            return False
        lane[1] += 1  # Other consumers have the last batches of the split.
        cursor, passed = self._next_place()
        self._consumer.put_empty(answer, split, cursor, passed)
        self._passed.clear()
        return True

    def _put(self, answer: Message, lane: list[int], worker: str | None) -> bool:
        lane[1] += 1
        cursor, passed = self._next_place()
        is_current = self._consumer.put(answer, cursor, passed)
        if is_current:
            fields = {key: answer.fields[key] for key in ("split", "index")}
            message = Message("confirm", {"run": self._consumer.run, **fields})
            self._workers.ask(worker or "", message)
            self._passed.clear()
        else:  # Ask the next holder of the split.
            lane[1] -= 1
            self._turn = (self._turn - 1) % len(self._lanes)
            self._consumer.reserve()
        return is_current

    def _pass(self, lane: list[int]) -> None:
        self._passed.append(lane[0])
        lane[:] = lane[0] + self._consumer.num_lanes, 0

    def _next_place(self) -> tuple[Any, tuple[int, ...]]:
        self._turn = (self._turn + 1) % len(self._lanes)
        cursor = {"lanes": [[*lane] for lane in self._lanes], "turn": self._turn}
        return cursor, tuple(self._passed)

    def _batch_at(self, split: int, index: int) -> tuple[Message | None, str | None]:
        """Returns the answer of the split's holder, and its name; no name if the split is done."""
        consumer = self._consumer
        while True:
            holder = consumer.client.ask("holder", run=consumer.run, split=split)
            if holder.kind == "end":
                return None, None
            if holder.kind == "holder":
                break
            if consumer.is_closed:
                return None, ""
        worker = holder.fields["worker"]
        fields = {
            "run": consumer.run,
            "consumer": consumer.name,
            "split": split,
            "index": index,
            "num_joined": consumer.num_joined,
            "compression": self._workers.compression_of(worker),
        }
        answer = self._workers.ask(worker, Message("batch_at", fields))
        if answer is None or answer.kind == "moved":
            time.sleep(_AGAIN_S)
            return None, worker
        return answer, worker


def register_source(
    service: str, source: Source, dataset_id: str | None, compression: str | None
) -> str:
    """Registers a source at a dispatcher, and returns its id.

    Raises TypeError if it cannot be pickled.
    """
    cloudpickle: Any = load("cloudpickle", needed_by="the input service", install="stratagem[ray]")
    try:
        pickled = cloudpickle.dumps(source)
    except Exception as error:
        raise TypeError(
            explain(
                f"The dataset cannot be sent to input workers: {error}",
                expected="a dataset that can be pickled: arrays, files, Grain, Hugging Face, or a "
                "function.",
                fix="make it in a function: sg.input.Dataset.from_generator(function).",
            )
        ) from error
    with ServiceClient(service) as client:
        answer = client.ask(
            "register",
            (np.frombuffer(pickled, np.uint8),),
            dataset_id=dataset_id,
            compression=compression,
            facts=dataclasses.asdict(facts_of(source)),
        )
    return answer.fields["dataset_id"]


class ServiceSource(Source):
    """A dataset that input workers read.

    `source` is the dataset, None if another process registered it. `spec` is then the spec of its
    batches, or None to read one.
    """

    def __init__(
        self,
        service: str,
        wanted: JobRequest,
        source: Source | None,
        spec: Any = None,
        *,
        compression: str | None = AUTO,
    ) -> None:
        self._compression = compression
        self._service = service
        self._wanted = wanted
        self._source = source
        self._spec = spec
        if source is not None:
            _check(source, wanted)

    def register(self) -> None:
        """Registers the dataset at the dispatcher."""
        assert self._source is not None
        dataset_id = register_source(
            self._service, self._source, self._wanted.dataset_id or None, self._compression
        )
        self._wanted = dataclasses.replace(self._wanted, dataset_id=dataset_id)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """OFF: each process gets batches of its own."""
        return AutoShardPolicy.OFF

    @property
    def cardinality(self) -> int:
        """Number of batches if one consumer gets all of them exactly once, else unknown."""
        if self._source is None:
            return UNKNOWN_CARDINALITY
        count = self._source.cardinality
        is_whole = self._wanted.job is None and self._wanted.is_exact
        is_known = is_whole and facts_of(self._source).num_files is None
        return count if is_known or count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of a batch; may read one."""
        if self._spec is None and self._source is not None:
            self._spec = self._source.element_spec()
        if self._spec is None:
            alone = dataclasses.replace(
                self._wanted, job=None, consumer_index=None, num_consumers=None
            )
            self._spec = super(
                ServiceSource, ServiceSource(self._service, alone, None)
            ).element_spec()
        return self._spec

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; joins the job at the first batch."""
        return ServiceReader(functools.partial(self._join, epoch))

    def _join(self, epoch: int, state: dict[str, Any] | None) -> JobConsumer:
        client = ServiceClient(self._service)
        try:
            try:
                return JobConsumer(client, self._wanted, epoch, state)
            except NotFoundError:
                if self._source is None:
                    raise
                # The dispatcher was started again without a journal.
                self.register()
                return JobConsumer(client, self._wanted, epoch, state)
        except BaseException:
            client.close()
            raise


class ServiceReader(Reader):
    """Reads one epoch of a job. `join` begins it, from a state or None."""

    def __init__(self, join: Any) -> None:
        self._join = join
        self._state: dict[str, Any] | None = None
        self._consumer: JobConsumer | None = None
        self._finalizer: Any = None

    def read(self) -> Any:
        """Returns the next batch that a worker has ready."""
        if self._consumer is None:
            self._consumer = self._begin()
        try:
            return self._consumer.next()
        except StopIteration:
            self.close()
            raise

    @property
    def identity(self) -> tuple[int, int]:
        """Split of the last batch that was returned, and its index there."""
        assert self._consumer is not None
        assert self._consumer.returned is not None
        split, index = self._consumer.returned
        assert index is not None
        return split, index

    def _begin(self) -> JobConsumer:
        consumer: JobConsumer = self._join(self._state)
        is_coordinated = consumer.wanted.num_consumers is not None
        fetching = (RoundFetching if is_coordinated else FreeFetching)(consumer)
        # The threads do not refer to this reader, so that it can be collected.
        self._finalizer = weakref.finalize(self, _close, consumer, fetching)
        consumer.start(fetching.follow)
        return consumer

    def state(self) -> Any:
        """Returns the batches that were returned, as JSON."""
        return self._state if self._consumer is None else self._consumer.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Resumes from a state: batches that were returned do not come again."""
        self.close()
        self._state, self._consumer = state, None

    def close(self) -> None:
        """Leaves the job."""
        if self._finalizer is not None:
            self._finalizer()


def _close(consumer: JobConsumer, fetching: FreeFetching | RoundFetching) -> None:
    consumer.close()
    fetching.close()


def _check(source: Source, wanted: JobRequest) -> None:
    """Raises ValueError if a dataset cannot be read as asked for."""
    facts = facts_of(source)
    if wanted.policy == ShardingPolicy.HINT:
        require_hint(facts)
    if wanted.is_exact:
        require_repeatable(facts)
    if wanted.trainer is not None:
        require_endless(facts)
