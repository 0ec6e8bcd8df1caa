"""Queue of scheduled functions that have not finished: queued, waiting for inputs, or running.

Source: TF 2.21 cluster_coordinator.py, _CoordinatedClosureQueue.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from stratagem.errors import CancelledError, ClosureInputError
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.coordinator.worker_errors import merge_reports

if TYPE_CHECKING:
    from stratagem.parameter_server.coordinator.shipping import ShippedCall


__all__ = ["Closure", "ClosureQueue", "MAX_CLOSURES"]

MAX_CLOSURES = 256 * 1024
_numbers = itertools.count(1)


class Closure:
    """One scheduled call of a function.

    `call` is the payload for the worker and `name` the function's name for messages. The call
    starts once all `inputs` are ready, on `worker` only, or on any worker if None. `number` is
    unique in this process.
    """

    def __init__(
        self,
        call: ShippedCall,
        *,
        name: str,
        inputs: Sequence[RemoteValue] = (),
        worker: int | None = None,
    ) -> None:
        self.call = call
        self.name = name
        self.inputs = tuple(inputs)
        self.worker = worker
        self.result = RemoteValue()
        self.number = next(_numbers)
        self.num_starts = 0


class ClosureQueue:
    """Queue of closures, started in the order in which they were scheduled.

    An error cancels all closures that have not started. Once none is running, `put`, `wait` or
    `is_done` raises it once, and the queue accepts closures again. `put` blocks while `capacity`
    closures have not started. `num_workers` is the number of workers that share the queue.
    """

    def __init__(self, capacity: int = MAX_CLOSURES) -> None:
        self._capacity = capacity
        self.num_workers = 1
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._line: deque[Closure] = deque()
        self._own: dict[int, deque[Closure]] = {}  # closures bound to one worker
        self._gone: dict[int | None, BaseException] = {}  # permanently lost workers
        self._waiting: OrderedDict[int, Closure] = OrderedDict()  # for inputs
        self._num_running = 0
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of closures per state: queued, waiting for inputs, running, and succeeded."""
        with self._changed:
            return {
                "queued": self._num_queued,
                "waiting": len(self._waiting),
                "running": self._num_running,
                "done": self._num_done,
            }

    def num_queued_for(self, workers: Iterable[int]) -> int:
        """Returns the number of queued closures that at least one of `workers` may run."""
        with self._changed:
            return len(self._line) + sum(len(self._own.get(worker, ())) for worker in workers)

    def put(self, closure: Closure) -> None:
        """Adds a closure; blocks while the queue is full.

        Raises:
            BaseException: the error of an earlier closure.
            RuntimeError: the coordinator is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self._is_closed or self._num_unstarted < self._capacity
            )
            self._raise_error()
            if self._is_closed:
                raise RuntimeError(
                    explain(
                        f"Cannot schedule {closure.name}: the coordinator is closed.",
                        expected="an open coordinator.",
                        fix="create a new strategy and a new coordinator.",
                        code="SG603",
                    )
                )
            if gone := self._gone_error(closure.worker):
                raise gone
            missing = [value for value in closure.inputs if not _is_there(value)]
            if not missing:
                self._append(closure)
                return
            self._waiting[id(closure)] = closure
        remaining = _Countdown(len(missing), lambda: self._start(closure))
        for value in missing:
            value.observe(remaining.count)

    def get(self, worker: int, is_busy: Callable[[], bool] = lambda: False) -> Closure | None:
        """Blocks until `worker` can start a closure; returns None once the queue is closed.

        If `is_busy()` is True, the worker takes shared work only if more closures are queued than
        there are workers, so that idle workers come first.
        """
        with self._changed:
            own = self._own.setdefault(worker, deque())
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or own
                    or len(self._line) > (self.num_workers if is_busy() else 0)
                )
            )
            if self._is_closed:
                return None
            closure = own.popleft() if own else self._line.popleft()
            closure.num_starts += 1
            self._num_running += 1
            self._changed.notify_all()
            return closure

    def finish(
        self, closure: Closure, value: object, count: Callable[[], None] | None = None
    ) -> None:
        """Records the result of a running closure.

        `count` adds its metric counts; calls of `count` never overlap.
        """
        if count is not None:
            with self._counting:
                count()
        # The result first: threads that wait for the queue fetch it right after.
        closure.result.set_value(value)
        with self._changed:
            self._num_running -= 1
            self._num_done += 1
            self._changed.notify_all()

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Records the error of a running closure and cancels all closures that have not started."""
        # First the queue: aborting the result fails dependents, and this is the error to report.
        with self._changed:
            if self._error is not None:
                merge_reports(self._error, error)
            given_up = self._give_up(error)
        closure.result.abort(error)
        _cancel(given_up)
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def put_back(self, closure: Closure) -> None:
        """Puts a closure whose worker was lost back at the front of the queue."""
        closure.result.abort(None)
        with self._changed:
            self._num_running -= 1
            is_given_up = self._error is not None or self._is_closed
            if not is_given_up:
                line = self._line if closure.worker is None else self._own[closure.worker]
                line.appendleft(closure)
            self._changed.notify_all()
        if is_given_up:
            _cancel([closure])
        elif gone := self._gone_error(closure.worker):
            self.break_all(gone)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is queued or running; returns False after `timeout_s` seconds.

        Raises:
            BaseException: the first error of a closure.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._is_idle, timeout_s)
            if is_over:
                self._raise_error()
            return is_over

    def is_done(self) -> bool:
        """Returns True if nothing is queued or running. Does not wait.

        Raises:
            BaseException: the first error of a closure, once none is running.
        """
        with self._changed:
            if self._num_running:
                return False
            self._raise_error()
            return self._is_idle

    def close(self) -> None:
        """Unblocks all waiting threads and cancels closures that have not started."""
        with self._changed:
            self._is_closed = True
            given_up = self._take_all()
            self._changed.notify_all()
        _cancel(given_up)

    def break_all(self, error: BaseException) -> None:
        """Cancels all closures because of an error elsewhere, such as the loss of a server."""
        with self._changed:
            given_up = self._give_up(error)
        _cancel(given_up)

    def lose_worker(self, worker: int | None, error: BaseException) -> None:
        """Marks a worker as permanently lost; None is all of them.

        If it is all of them, or closures bound to it are queued, all closures are cancelled because
        of `error`.
        """
        with self._changed:
            self._gone[worker] = error
            is_wanted = worker is None or bool(self._own.get(worker))
        if is_wanted:
            self.break_all(error)

    def find_worker(self, worker: int) -> None:
        """Marks a permanently lost worker as available again."""
        with self._changed:
            self._gone.pop(worker, None)
            self._gone.pop(None, None)

    @property
    def _num_queued(self) -> int:
        return len(self._line) + sum(map(len, self._own.values()))

    @property
    def _num_unstarted(self) -> int:
        return self._num_queued + len(self._waiting)

    @property
    def _is_idle(self) -> bool:
        return not self._num_unstarted and not self._num_running

    def _gone_error(self, worker: int | None) -> BaseException | None:
        error = self._gone.get(worker)
        # Raised several times: without the frames of earlier times.
        return None if error is None else error.with_traceback(None)

    def _append(self, closure: Closure) -> None:
        line = self._line
        if closure.worker is not None:
            line = self._own.setdefault(closure.worker, deque())
        line.append(closure)
        self._changed.notify_all()

    def _start(self, closure: Closure) -> None:
        """Queues a closure whose inputs are settled, or fails it if one of them failed."""
        failed = next((one for one in closure.inputs if not _is_there(one)), None)
        with self._changed:
            if self._waiting.pop(id(closure), None) is None:
                return  # already cancelled
            error = self._gone_error(closure.worker)
            if failed is not None:
                error = _input_error(closure, failed)
            if error is None:
                self._append(closure)
                return
            given_up = self._give_up(error)
        closure.result.abort(error)
        _cancel(given_up)

    def _give_up(self, error: BaseException) -> list[Closure]:
        # Cancellations follow from another error.
        if self._error is None and not isinstance(error, CancelledError):
            self._error = error
        given_up = self._take_all()
        self._changed.notify_all()
        return given_up

    def _take_all(self) -> list[Closure]:
        given_up = [*self._line, *self._waiting.values()]
        given_up += [closure for line in self._own.values() for closure in line]
        self._line.clear()
        self._waiting.clear()
        for line in self._own.values():
            line.clear()
        return given_up

    def _raise_error(self) -> None:
        """Raises an error once, after the running closures have finished."""
        if self._error is None:
            return
        self._changed.wait_for(lambda: not self._num_running)
        error = self._take_error()
        if error is not None:  # None: another thread has raised it
            raise error

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error


class _Countdown:
    """Calls `function` after `count` calls of its `count` method."""

    def __init__(self, count: int, function: Callable[[], None]) -> None:
        self._remaining = count
        self._function = function
        self._lock = threading.Lock()

    def count(self, _: object) -> None:
        with self._lock:
            self._remaining -= 1
            is_last = self._remaining == 0
        if is_last:
            self._function()


def _is_there(value: RemoteValue) -> bool:
    return value.status.name == "READY"


def _cancel(closures: Sequence[Closure]) -> None:
    for closure in closures:
        closure.result.abort(
            CancelledError(
                explain(
                    f"{closure.name} was cancelled before it finished.",
                    expected="no error in another function (join() or schedule() raises it), and "
                    "no close() of the coordinator before join().",
                    fix="find the first error or the early close(), then schedule it again.",
                    code="SG603",
                )
            )
        )


def _input_error(closure: Closure, failed: RemoteValue) -> ClosureInputError:
    error = ClosureInputError(
        explain(
            f"An input of {closure.name} failed: {failed.error!r}",
            expected="inputs whose functions succeed.",
            fix="fix that error first, then schedule both functions again.",
            code="SG604",
        )
    )
    error.__cause__ = failed.error
    return error
