"""Coordinator's connection to one worker: sends closures and detects losses."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.errors import PSUnavailableError, UnavailableError
from stratagem.messages import explain
from stratagem.parameter_server.client.lost_updates import LostUpdates
from stratagem.parameter_server.coordinator.closures import Closure, ClosureQueue
from stratagem.parameter_server.coordinator.scheduling import scheduling_of
from stratagem.parameter_server.coordinator.shipping import Shipment
from stratagem.parameter_server.coordinator.transient_failures import TransientFailures
from stratagem.parameter_server.coordinator.worker_errors import WorkerReport
from stratagem.parameter_server.transport.connection import Connections, ServerError
from stratagem.parameter_server.transport.wire import Message

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


__all__ = ["WorkerLink"]

# The next closure is sent while one runs, if more are queued than there are workers.
_NUM_LANES = 2
_LOOK_S = 0.1


class WorkerLink:
    """Keeps one worker busy, with threads that take closures from the queue.

    `introduction` returns the message that makes the worker join. `failures` is shared by all
    workers.
    """

    def __init__(
        self,
        index: int,
        strategy: Strategy,
        connections: Connections,
        queue: ClosureQueue,
        introduction: Callable[[], Message],
        failures: TransientFailures,
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
        self._counting = threading.Lock()
        self._known: set[int] = set()
        self._num_sent = 0
        self._num_running = 0
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
        return self._num_running > 0

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
                thread.join(_LOOK_S)

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
            with self._turn:  # closures are numbered in the order in which they are taken
                self._is_there.wait()
                self._rejoin()
                closure = self._queue.get(self._index, lambda: self._num_running > 0)
                if closure is None:
                    return
                message = self._prepared(closure)
            if message is None:
                continue
            try:
                answer = self._connections.ask(self._index, message)
            except UnavailableError:
                self._take_loss(closure)
                continue
            except BaseException as error:  # noqa: BLE001 - raised by the queue
                self._count_running(-1)
                self._has_joined = False  # the worker may wait for a number that was never sent
                self._queue.fail(closure, error)
                continue
            if answer.kind == "again":
                self._count_running(-1)
                self._queue.put_back(closure)
                continue
            self._take(closure, answer)

    def _rejoin(self) -> None:
        """Joins again if one lane lost a function while another has sent a later one.

        The worker keeps the later one until the earlier arrives, and gives it back when joined.
        """
        while self._is_running_unjoined():
            try:
                self._introduce()
            except UnavailableError:
                self._is_closed.wait(_LOOK_S)
                self._is_there.wait()
            except BaseException:  # noqa: BLE001 - raised again for the next closure
                return

    def _is_running_unjoined(self) -> bool:
        return self.is_running and not self._has_joined and not self._is_closed.is_set()

    def _prepared(self, closure: Closure) -> Message | None:
        """Sends a closure's shipments and returns its message; None if that fails."""
        try:
            self._introduce()
            for shipment in (*closure.call.resources, closure.call.function):
                self._ship(shipment)
            message = closure.call.message(self._index, self._strategy)
        except UnavailableError:
            self._has_joined = False
            self._queue.put_back(closure)
            return None
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._queue.fail(closure, error)
            return None
        # Servers make the updates of a function once, even if it runs again.
        message.fields.update(
            order=self._num_sent, closure=closure.number, is_rerun=closure.num_starts > 1
        )
        self._num_sent += 1
        self._count_running(1)
        return message

    def _count_running(self, change: int) -> None:
        with self._counting:
            self._num_running += change

    def _take_loss(self, closure: Closure) -> None:
        self._count_running(-1)
        self._has_joined = False
        self._queue.put_back(closure)

    def _take(self, closure: Closure, answer: Message) -> None:
        """Handles the result or the error of a closure."""
        self._count_running(-1)  # before the queue wakes waiting threads, which read the count
        try:
            if answer.kind == "failed":
                error = self._error_of(answer)
                if not self._failures.is_tolerated(error):
                    raise error
                self._queue.put_back(closure)
                return
            result, *counted = answer.arrays
            self._lost_updates.note(answer.fields["losses"])
            self._lost_updates.note_repeated(answer.fields["num_repeated"])
            for number, names in answer.fields["built"]:
                self._packing.build(number, names, self._strategy)
            value = self._packing.unpack(result.tobytes(), self._strategy)
            self._failures.note_success()
            self._queue.finish(
                closure, value, lambda: self._count(answer.fields["counted"], counted)
            )
        except BaseException as error:  # noqa: BLE001 - raised by the queue
            self._queue.fail(closure, error)

    def _count(self, numbers: list[int], counted: list[Any]) -> None:
        """Adds a closure's metric counts, once per closure even after retries."""
        for number, part in zip(numbers, counted, strict=True):
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
            raise self._error_of(answer)
        self._known.add(shipment.number)

    def _error_of(self, answer: Message) -> BaseException:
        error: BaseException = pickle.loads(answer.arrays[0].tobytes())  # noqa: S301 - proved
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
        WorkerReport(error, self._index, answer.fields["trace"])
        return error
