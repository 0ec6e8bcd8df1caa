"""The coordinator's side of one worker: hands it closures, and notices when it is lost."""

from __future__ import annotations

import pickle
import threading
from typing import Any

from stratagem.coordinator.closures import Closure, ClosureQueue
from stratagem.coordinator.packing import packing
from stratagem.coordinator.shipping import Shipment
from stratagem.errors import PSUnavailableError, UnavailableError
from stratagem.messages import explain
from stratagem.servers import Connections, Message

__all__ = ["WorkerLink"]

# One closure runs while the next one is on its way, where there are enough for all workers.
_NUM_LANES = 2


class WorkerLink:
    """Keeps one worker busy, in threads of its own.

    Args:
        index: of the worker.
        strategy: the coordinator's.
        connections: to the workers.
        queue: where closures come from.
        introduction: what the worker is told before anything else.
    """

    def __init__(
        self,
        index: int,
        strategy: Any,
        connections: Connections,
        queue: ClosureQueue,
        introduction: Message,
    ) -> None:
        self._index = index
        self._strategy = strategy
        self._connections = connections
        self._queue = queue
        self._introduction = introduction
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._has_joined = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(lane,), name=f"worker {index} lane {lane}", daemon=True
            )
            for lane in range(_NUM_LANES)
        ]

    def start(self) -> None:
        """Begins to take closures."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until the threads have ended, after the queue was closed."""
        for thread in self._threads:
            thread.join()

    def _work(self, lane: int) -> None:
        while (closure := self._queue.get(self._index, is_spare=lane > 0)) is not None:
            try:
                self._run(closure)
            except UnavailableError:
                with self._lock:
                    self._has_joined = False
                    self._known.clear()
                self._queue.put_back(closure)
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                self._queue.fail(closure, error)

    def _run(self, closure: Closure) -> None:
        self._introduce()
        for shipment in (*closure.call.resources, closure.call.function):
            self._ship(shipment)
        message = closure.call.message(self._index, self._strategy)
        answer = self._connections.ask(self._index, message)
        if answer.kind == "failed":
            raise self._error_of(answer)
        result, *counted = answer.arrays
        for number, names in answer.fields["built"]:
            packing().build(number, names, self._strategy)
        value = packing().unpack(result.tobytes(), self._strategy)
        self._queue.finish(closure, value, lambda: self._count(answer.fields["counted"], counted))

    def _count(self, numbers: list[int], counted: list[Any]) -> None:
        """Adds what a function has counted; once, however often it was started."""
        for number, part in zip(numbers, counted, strict=True):
            variable = packing().collected(number)
            if variable is not None:
                variable.store_whole(variable.storage + part)

    def _introduce(self) -> None:
        with self._lock:
            if not self._has_joined:
                self._connections.ask(self._index, self._introduction)
                self._has_joined = True

    def _ship(self, shipment: Shipment) -> None:
        with self._lock:
            if shipment.number in self._known:
                return
            answer = self._connections.ask(self._index, shipment.message())
            if answer.kind == "failed":
                raise self._error_of(answer)
            self._known.add(shipment.number)

    def _error_of(self, answer: Message) -> BaseException:
        error: BaseException = pickle.loads(answer.arrays[0].tobytes())
        if isinstance(error, UnavailableError):  # a worker cannot reach a server
            lost = PSUnavailableError(
                explain(
                    f"Worker {self._index} could not reach a parameter server: {error}",
                    expected="servers that run, or are started again in time.",
                    fix="look at why the server ended; restore a checkpoint.",
                )
            )
            lost.__cause__ = error
            return lost
        if answer.fields["trace"]:
            error.add_note(f"Raised on worker {self._index}:\n{answer.fields['trace']}")
        return error
