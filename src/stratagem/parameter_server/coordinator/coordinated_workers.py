"""Workers of a coordinator: their links, and losses and returns among them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from stratagem.errors import PSUnavailableError, UnavailableError, explain
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.coordinator.closure_queue import MAX_CLOSURES, ClosureQueue
from stratagem.parameter_server.coordinator.remote_value import Closure, Countdown
from stratagem.parameter_server.coordinator.shipping import (
    MAX_UNANSWERED,
    Ended,
    SentCall,
    Shipment,
    WorkerReport,
    ended_in,
    pack_calls,
    scheduling_of,
)
from stratagem.parameter_server.server.changes import LostUpdates, by_kind
from stratagem.resources import Closing
from stratagem.strategies.strategy import Strategy

# Watch for synchronous updates that can no longer complete.
#
# A restarted server may wait for a worker that waits at another server. Or the remaining functions
# occupy fewer workers than an update needs.

_LOOK_S = 1.0


def is_stalled(
    running: Collection[int], idle: Collection[int], num_queued: int, waiting: Collection[str]
) -> bool:
    """Returns True if every worker that could complete an update waits for it.

    `running` and `idle` are indices of available workers, `num_queued` counts functions that idle
    ones may run, and `waiting` holds the names of workers that wait at a server.
    """
    may_come = bool(idle) and num_queued > 0
    return bool(running) and not may_come and {f"worker {one}" for one in running} <= {*waiting}


class StallWatch(Closing):
    """Checks for stalled updates once per second and applies them with the gradients that arrived.

    `workers` returns the workers that run a function, the available idle ones, and the number of
    functions queued for the latter. `num_stalls` counts the stalls.
    """

    def __init__(
        self,
        client: ServerClient,
        workers: Callable[[], tuple[Collection[int], Collection[int], int]],
    ) -> None:
        self._client = client
        self._workers = workers
        self._is_over = threading.Event()
        self._last: Any = None
        self.num_stalls = 0
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def close(self) -> None:
        """Stops the checks; does not wait for one in progress."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - other code reports lost servers; it looks again
                self._last = None

    def _look(self) -> None:
        running, idle, num_queued = self._workers()
        if not running:
            self._last = None
            return
        servers = self._client.describe()
        waiting = {name for state in servers.values() for name in state["waiting"]}
        now = [
            (state["lifetime"], state["version"], state["num_discarded"], state["waiting"])
            for state in servers.values()
        ]
        # Stalled twice in the same state: a single look may fall between two answers.
        if is_stalled(running, idle, num_queued, waiting) and now == self._last:
            self.num_stalls += 1
            self._client.flush()
            now = None
        self._last = now


# Retries after transient failures of workers to reach a server.


class TransientFailures:
    """Counts consecutive functions, over all workers, that could not reach a server.

    More than `limit` of them in a row are an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()

    def note_success(self) -> None:
        """Resets the count after a function has succeeded."""
        with self._lock:
            self._count = 0

    def is_tolerated(self, error: BaseException) -> bool:
        """Returns True, with a warning, if the failed function should be retried."""
        if not isinstance(error, PSUnavailableError):
            return False
        with self._lock:
            self._count += 1
            count = self._count
        if count > self._limit:
            return False
        (reason, *_) = str(error).splitlines()
        warnings.warn(
            explain(
                f"Failure {count} of at most {self._limit} in a row; retrying the function: "
                f"{reason}",
                expected="parameter servers that all workers can reach.",
                fix="check the network and the servers if this warning repeats.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )
        return True


# Coordinator's connection to one worker: sends closures and detects losses.

# The next group is sent while one runs, if more closures are queued than there are workers.
_NUM_LANES = 2
_LINK_LOOK_S = 0.1


class WorkerLink:
    """Keeps one worker busy, with threads that take closures from the queue.

    `introduction` returns the message that makes the worker join. `failures` is shared by all
    workers. With `is_grouping`, the worker gets short functions in groups.
    """

    def __init__(
        self,
        index: int,
        strategy: Strategy,
        connections: Connections,
        queue: ClosureQueue,
        introduction: Callable[[], Message],
        failures: TransientFailures,
        *,
        is_grouping: bool = True,
    ) -> None:
        self._index = index
        self._strategy = strategy
        self._packing = scheduling_of(strategy).packing
        self._connections = connections
        self._queue = queue
        self._introduction = introduction
        self._failures = failures
        self._is_closed = threading.Event()
        self._turn = threading.Lock()
        # Orders of messages that the worker has not answered, and of those whose functions may run
        # again. The condition is for a message that may be sent.
        self._answered = threading.Condition()
        self._unanswered: set[int] = set()
        self._open: set[int] = set()
        self._known: set[int] = set()
        self._num_sent = 0
        self._expected_s = _expected_s if is_grouping else None
        self._lost_updates = LostUpdates(index)
        self._has_joined = False
        self._is_there = threading.Event()
        self._is_there.set()
        self._threads = [
            threading.Thread(target=self._work, name=f"worker {index} lane {lane}", daemon=True)
            for lane in range(_NUM_LANES)
        ]

    @property
    def is_running(self) -> bool:
        """True if the worker runs a function or one was sent to it."""
        return bool(self._unanswered)

    @property
    def losses(self) -> Counter[str]:
        """Updates lost by servers, by server, run and kind, as seen by the worker's processes."""
        return self._lost_updates.losses

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Abandons running functions and waits for the threads. Close the queue first."""
        self._is_closed.set()
        self._is_there.set()
        for thread in self._threads:
            while thread.is_alive():  # repeat: the thread may ask again if the worker returns
                self._connections.abandon(self._index, "the coordinator was closed.")
                thread.join(_LINK_LOOK_S)

    def lose(self, reason: str) -> None:
        """Marks the worker as lost; its running functions return to the queue."""
        self._is_there.clear()
        self._connections.abandon(self._index, reason)
        self._has_joined = False

    def find(self, address: str) -> None:
        """Marks the worker as available again, at a new address."""
        self._connections.move(self._index, address)
        self._is_there.set()

    def send_address(self, server: int, address: str) -> None:
        """Sends a server's new address to the worker, which may be waiting for that server."""
        message = Message("move", {"server": server, "address": address})
        with contextlib.suppress(UnavailableError, ServerError):  # joining also sends addresses
            self._connections.ask(self._index, message)

    def _work(self) -> None:
        self._is_closed.wait(self._index * self._strategy.limits.start_delay_s)
        while True:
            with self._turn:  # groups are numbered in the order in which they are taken
                self._is_there.wait()
                self._rejoin()
                self._wait_for_answers()
                closures = self._queue.take(
                    self._index, lambda: self.is_running, expected_s=self._expected_s
                )
                if not closures:
                    return
                calls = self._calls(closures)
                if calls is None:
                    continue
                order, message = self._next_message(calls)
            self._send(closures, order, message)
            self._close_when_settled(order, [one for one in closures if not one.is_done])

    def _close_when_settled(self, order: int, closures: Sequence[Closure]) -> None:
        """Lets servers forget the functions of a message once none of them will run again."""
        if not closures:
            self._open.discard(order)
            return
        remaining = Countdown(len(closures), functools.partial(self._open.discard, order))
        for closure in closures:
            closure.result.observe(remaining.count)

    def _send(self, closures: Sequence[Closure], order: int, message: Message) -> None:
        """Sends a group and handles its answer."""
        try:
            answer = self._connections.ask(self._index, message)
        except UnavailableError:
            self._has_joined = False
            self._note_answered(order)
            self._put_back(closures)
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._has_joined = False  # the worker may wait for a number that was never sent
            self._note_answered(order)
            self._fail(closures, 0, error)
        else:
            # Before the queue wakes waiting threads, which look at `is_running`.
            self._note_answered(order)
            if answer.kind == "again":
                self._put_back(closures)
            else:
                self._take(closures, answer)

    def _rejoin(self) -> None:
        """Joins again if one lane lost a function while another has sent a later one.

        The worker keeps the later one until the earlier arrives, and gives it back when joined.
        """
        while self.is_running and not self._has_joined and not self._is_closed.is_set():
            try:
                self._introduce()
            except UnavailableError:
                self._is_closed.wait(_LINK_LOOK_S)
                self._is_there.wait()
            except BaseException:  # noqa: BLE001 - raised again for the next closure
                return

    def _wait_for_answers(self) -> None:
        """Waits while the worker has answered later messages, but not an earlier one.

        The worker would drop the answer to the earlier one, which may have been lost in transit.
        """
        with self._answered:
            self._answered.wait_for(
                lambda: (
                    self._num_sent - min(self._unanswered, default=self._num_sent) < MAX_UNANSWERED
                )
            )

    def _note_answered(self, order: int) -> None:
        with self._answered:
            self._unanswered.discard(order)
            self._answered.notify_all()

    def _calls(self, closures: Sequence[Closure]) -> list[SentCall] | None:
        """Sends the shipments of closures and returns their calls; None if that fails."""
        calls: list[SentCall] = []
        try:
            self._introduce()
            for closure in closures:
                for shipment in (*closure.call.resources, closure.call.function):
                    self._ship(shipment)
                # Servers make the updates of a function once, even if it runs again.
                packed = closure.call.packed_for(self._index, self._strategy)
                number, is_rerun = closure.call.function.number, closure.num_starts > 1
                calls.append(SentCall(number, closure.number, is_rerun, packed))
        except UnavailableError:
            self._has_joined = False
            self._put_back(closures)
            return None
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._fail(closures, len(calls), error)
            return None
        return calls

    def _next_message(self, calls: Sequence[SentCall]) -> tuple[int, Message]:
        """Returns the message of a group and its order, and counts it as sent."""
        # A new `num_writes` makes the worker discard values from before the coordinator's writes.
        num_writes = self._strategy.placement.remote.variables.num_writes
        order = self._num_sent
        first_open = min(tuple(self._open), default=order)
        fields = {"order": order, "first_open": first_open, "num_writes": num_writes}
        with self._answered:
            self._num_sent += 1
            self._unanswered.add(order)
        self._open.add(order)
        return order, pack_calls(calls, fields)

    def _put_back(self, closures: Sequence[Closure]) -> None:
        for closure in reversed(closures):  # each becomes the first of the queue
            self._queue.put_back(closure)

    def _fail(self, closures: Sequence[Closure], place: int, error: BaseException) -> None:
        """Fails one closure of a group, so that the queue cancels the others."""
        self._queue.fail(closures[place], error)
        self._put_back([*closures[:place], *closures[place + 1 :]])

    def _take(self, closures: Sequence[Closure], answer: Message) -> None:
        """Handles the outcomes of a group; its functions after a failed one did not run."""
        try:
            fields = answer.fields
            self._lost_updates.note(fields["losses"])
            self._lost_updates.note_repeated(fields["num_repeated"])
            for number, names in fields["built"]:
                self._packing.build(number, names, self._strategy)
            ended = list(ended_in(answer))
            if ended[0].trace is None:
                self._failures.note_success()
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._fail(closures, 0, error)
            return
        for closure, end in zip(closures, ended, strict=False):
            self._settle(closure, end)
        self._put_back(closures[len(ended) :])

    def _settle(self, closure: Closure, end: Ended) -> None:
        """Handles the result or the error of a closure."""
        closure.call.function.duration.note(end.duration_s)
        try:
            if end.trace is not None:
                error = self._error_of(end.packed, end.trace)
                if not self._failures.is_tolerated(error):
                    raise error
                self._queue.put_back(closure)
                return
            value = self._packing.unpack(end.packed, self._strategy)
            count = functools.partial(self._count, end.counted) if end.counted else None
            self._queue.finish(closure, value, count)
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._queue.fail(closure, error)

    def _count(self, counted: dict[int, np.ndarray]) -> None:
        """Adds a closure's metric counts, once per closure even after retries."""
        for number, part in counted.items():
            variable = self._packing.collected(number)
            if variable is not None:
                variable.store_whole(variable.storage + part)

    def _introduce(self) -> None:
        if not self._has_joined:
            self._known.clear()
            message = self._introduction()
            message.fields.update(index=self._index, first_order=self._num_sent)
            self._connections.ask(self._index, message)
            self._has_joined = True

    def _ship(self, shipment: Shipment) -> None:
        if shipment.number in self._known:
            return
        answer = self._connections.ask(self._index, shipment.message())
        if answer.kind == "failed":
            raise self._error_of(answer.arrays[0].data, answer.fields["trace"])
        self._known.add(shipment.number)

    def _error_of(self, packed: memoryview, trace: str) -> BaseException:
        error: BaseException = pickle.loads(packed)  # noqa: S301 - proved
        if isinstance(error, UnavailableError):  # the worker could not reach a server
            lost = PSUnavailableError(
                explain(
                    f"Worker {self._index} could not reach a parameter server: {error}",
                    expected="servers that run, or restart within the recovery timeout.",
                    fix="look at the server's log to find out why it stopped, then restore a "
                    "checkpoint.",
                    code="SG602",
                )
            )
            lost.__cause__ = error
            return lost
        WorkerReport(error, self._index, trace)
        return error


def _expected_s(closure: Closure) -> float:
    return closure.call.function.duration.expected_s


class CoordinatedWorkers(Closing):
    """Starts the workers of a strategy, and keeps them busy with functions from a queue.

    `processes` are those of the workers. `stalls` checks for stalled synchronous updates; None if
    updates are asynchronous.
    """

    def __init__(self, strategy: RemoteStateStrategy, queue: ClosureQueue) -> None:
        self._strategy = strategy
        self._queue = queue
        self._ended: set[int] = set()
        self._num_needed = strategy.placement.remote.variables.mode.num_needed
        self._expecting = threading.Lock()
        self.processes = strategy.cluster.start_workers()
        addresses = self.processes.addresses
        # In a synchronous update workers wait for each other: none may hold functions back.
        is_synchronous = self._num_needed > 0
        self._queue.num_workers = MAX_CLOSURES if is_synchronous else len(addresses)
        self._connections = Connections(
            strategy.cluster.keys,
            addresses,
            peers="Worker",
            silence_s=strategy.limits.recovery_timeout_s,
        )
        self._name = uuid.uuid4().hex
        failures = TransientFailures(strategy.limits.max_transient_failures)
        self._links = [
            WorkerLink(
                index,
                strategy,
                self._connections,
                self._queue,
                self._introduction,
                failures,
                is_grouping=not is_synchronous,
            )
            for index in range(len(addresses))
        ]
        strategy.cluster.report_moves_to(self._note_move)
        self.processes.watch(
            lambda worker, reason: self._links[worker].lose(reason),
            self._note_return,
            self._note_end,
        )
        for link in self._links:
            link.start()
        self.stalls: StallWatch | None = None
        if is_synchronous:
            self.stalls = StallWatch(strategy.placement.remote.variables.client, self._at_work)

    @property
    def count(self) -> int:
        """Number of workers, including lost ones."""
        return len(self._links)

    @property
    def present(self) -> list[int]:
        """Indices of all workers that are not permanently lost."""
        return [index for index in range(len(self._links)) if index not in self._ended]

    @property
    def lost_updates(self) -> Counter[str]:
        """Updates lost in server restarts, by kind: the most that any process saw of each run."""
        losses = Counter(self._strategy.placement.remote.variables.client.losses)
        for link in self._links:
            losses |= link.losses
        return by_kind(losses)

    def close(self) -> None:
        """Stops the workers; close the queue first."""
        if self.stalls is not None:
            self.stalls.close()
        for link in self._links:
            link.close()
        self.processes.close()
        self._connections.close()

    def _at_work(self) -> tuple[set[int], set[int], int]:
        running = {index for index, link in enumerate(self._links) if link.is_running}
        idle = {*range(len(self._links))} - running - self._ended
        return running, idle, self._queue.num_queued_for(idle)

    def _introduction(self) -> Message:
        """Returns the message that makes a worker join the cluster."""
        cluster, variables = self._strategy.cluster, self._strategy.placement.remote.variables
        fields = {
            "coordinator": self._name,
            "servers": [
                cluster.locate_server(server) or address
                for server, address in enumerate(cluster.server_addresses)
            ],
            "mode": dataclasses.asdict(variables.mode),
            "recovery_timeout_s": self._strategy.limits.recovery_timeout_s,
        }
        return Message("join", fields)

    def _note_move(self, server: int, address: str) -> None:
        """Sends a restarted server's new address to the workers, which may wait at the old one."""
        for link in self._links:
            threading.Thread(target=link.send_address, args=(server, address), daemon=True).start()
        if self._ended:  # the restarted server may have an old count of workers
            self._expect_present()

    def _note_return(self, worker: int, address: str) -> None:
        if worker in self._ended:
            self._ended.discard(worker)
            self._queue.find_worker(worker)
            self._expect_present()
        self._links[worker].find(address)

    def _note_end(self, worker: int, error: Exception) -> None:
        """Handles a worker that will not be restarted: training continues on the others, if any."""
        self._queue.lose_worker(worker, error)
        self._ended.add(worker)
        if len(self._ended) == len(self._links):
            self._queue.lose_worker(None, error)
        self._expect_present()

    def _expect_present(self) -> None:
        """Makes synchronous updates wait only for available workers. Does not block."""
        if self._num_needed:
            threading.Thread(target=self._send_expected, daemon=True).start()

    def _send_expected(self) -> None:
        variables = self._strategy.placement.remote.variables
        with self._expecting:
            # Backup workers absorb losses first; only then do updates need fewer gradients.
            num_needed = max(1, min(self._num_needed, len(self.present)))
            variables.mode = dataclasses.replace(variables.mode, num_needed=num_needed)
            # Servers without an optimizer get this mode with it; lost ones after their restart.
            with contextlib.suppress(UnavailableError, ServerError):
                variables.client.expect(num_needed)
