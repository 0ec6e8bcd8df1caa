"""The functions that were scheduled and have not ended: in line, waiting for inputs, or running.

Source: TF 2.21 cluster_coordinator.py, _CoordinatedClosureQueue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem.errors import CancelledError, ClosureInputError
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.coordinator.worker_errors import merge_reports

__all__ = ["Closure", "ClosureQueue", "MAX_CLOSURES"]

MAX_CLOSURES = 256 * 1024


class Closure:
    """A function that was scheduled once.

    Args:
        call: what a worker is given.
        name: of the function, for messages.
        inputs: results of other functions that it needs.
        worker: the only worker that may run it; None for any.
    """

    def __init__(
        self,
        call: Any,
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
        self.num_starts = 0


class ClosureQueue:
    """Hands closures to workers in the order in which they came.

    An error of one cancels those that have not started. It is raised once, by `put`, `wait` or
    `is_done`, when none runs any more; then all begins anew.

    Args:
        capacity: how many closures may be there before `put` waits.

    `num_workers` is how many share the line.
    """

    def __init__(self, capacity: int = MAX_CLOSURES) -> None:
        self._capacity = capacity
        self.num_workers = 1
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._line: deque[Closure] = deque()
        self._own: dict[int, deque[Closure]] = {}  # of those that only one worker may run
        self._gone: dict[int | None, BaseException] = {}  # workers that will never run them
        self._waiting: OrderedDict[int, Closure] = OrderedDict()  # for inputs
        self._num_running = 0
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of closures that are queued, wait for inputs, run, and have succeeded."""
        with self._changed:
            return {
                "queued": self._num_queued,
                "waiting": len(self._waiting),
                "running": self._num_running,
                "done": self._num_done,
            }

    def num_queued_for(self, workers: Iterable[int]) -> int:
        """Returns how many closures are in line that one of some workers may run.

        Args:
            workers: their indices.
        """
        with self._changed:
            return len(self._line) + sum(len(self._own.get(worker, ())) for worker in workers)

    def put(self, closure: Closure) -> None:
        """Takes a closure; waits while there are too many.

        Args:
            closure: the closure.

        Raises:
            BaseException: the error of an earlier one.
            RuntimeError: the coordinator was closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self._is_closed or self._num_unstarted < self._capacity
            )
            self._raise_error()
            if self._is_closed:
                raise RuntimeError(
                    explain(
                        f"{closure.name} was scheduled on a coordinator that was closed.",
                        expected="an open one.",
                        fix="make a new strategy and a new coordinator.",
                    )
                )
            if closure.worker in self._gone:
                raise self._gone[closure.worker]
            missing = [value for value in closure.inputs if not _is_there(value)]
            if not missing:
                self._append(closure)
                return
            self._waiting[id(closure)] = closure
        remaining = _Countdown(len(missing), lambda: self._start(closure))
        for value in missing:
            value.observe(remaining.count)

    def get(self, worker: int, is_busy: Callable[[], bool] = lambda: False) -> Closure | None:
        """Waits for a closure that a worker may run.

        Args:
            worker: its index.
            is_busy: tells whether the worker runs another one now; then the line has to be long
                enough for all workers.

        Returns:
            The closure; it runs now. None when the coordinator was closed.
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

    def finish(self, closure: Closure, value: Any, count: Callable[[], None] | None = None) -> None:
        """Notes that a closure has ended well.

        Args:
            closure: one that runs.
            value: what it returned.
            count: adds what it has counted; one closure at a time.
        """
        if count is not None:
            with self._counting:
                count()
        # Its result first: whoever waits for the queue may fetch it then.
        closure.result.set_value(value)
        with self._changed:
            self._num_running -= 1
            self._num_done += 1
            self._changed.notify_all()

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Notes that a closure has raised an error, and cancels those that have not started.

        Args:
            closure: one that runs.
            error: what it raised.
        """
        # First what follows from it, so that it is this error that is told.
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
        """Puts a closure first in line again, because its worker was lost.

        Args:
            closure: one that ran.
        """
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
        elif closure.worker in self._gone:
            self.break_all(self._gone[closure.worker])

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is in line and nothing runs.

        Args:
            timeout_s: how long; None for as long as it takes.

        Returns:
            Whether that is so.

        Raises:
            BaseException: the first error of a closure.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._is_idle, timeout_s)
            if is_over:
                self._raise_error()
            return is_over

    def is_done(self) -> bool:
        """Returns True if nothing is queued and nothing runs.

        Raises:
            BaseException: the first error of a closure, when nothing runs any more.
        """
        with self._changed:
            if self._error is not None:
                self._raise_error()
            return self._is_idle

    def close(self) -> None:
        """Ends all waiting; what has not started is cancelled."""
        with self._changed:
            self._is_closed = True
            given_up = self._take_all()
            self._changed.notify_all()
        _cancel(given_up)

    def break_all(self, error: BaseException) -> None:
        """Notes that nothing can go on, such as after the loss of a server.

        Args:
            error: why.
        """
        with self._changed:
            given_up = self._give_up(error)
        _cancel(given_up)

    def lose_worker(self, worker: int, error: BaseException) -> None:
        """Notes that a worker is gone for good: what only it may run never will.

        Args:
            worker: its index.
            error: why.
        """
        with self._changed:
            self._gone[worker] = error
            is_wanted = bool(self._own.get(worker))
        if is_wanted:
            self.break_all(error)

    def find_worker(self, worker: int) -> None:
        """Notes that a worker is back that was gone for good.

        Args:
            worker: its index.
        """
        with self._changed:
            self._gone.pop(worker, None)

    @property
    def _num_queued(self) -> int:
        return len(self._line) + sum(map(len, self._own.values()))

    @property
    def _num_unstarted(self) -> int:
        return self._num_queued + len(self._waiting)

    @property
    def _is_idle(self) -> bool:
        return not self._num_unstarted and not self._num_running

    def _append(self, closure: Closure) -> None:
        line = self._line
        if closure.worker is not None:
            line = self._own.setdefault(closure.worker, deque())
        line.append(closure)
        self._changed.notify_all()

    def _start(self, closure: Closure) -> None:
        """Its inputs are there, or will never be."""
        failed = next((one for one in closure.inputs if not _is_there(one)), None)
        with self._changed:
            if self._waiting.pop(id(closure), None) is None:
                return  # cancelled meanwhile
            error = self._gone.get(closure.worker)
            if failed is not None:
                error = _input_error(closure, failed)
            if error is None:
                self._append(closure)
                return
            given_up = self._give_up(error)
        closure.result.abort(error)
        _cancel(given_up)

    def _give_up(self, error: BaseException) -> list[Closure]:
        # Those that follow from it are no news.
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
        """Raises an error once, when nothing runs any more."""
        if self._error is None:
            return
        self._changed.wait_for(lambda: not self._num_running)
        error = self._take_error()
        if error is not None:  # else another thread has raised it meanwhile
            raise error

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error


class _Countdown:
    """Calls a function after as many calls of its own."""

    def __init__(self, count: int, function: Callable[[], None]) -> None:
        self._remaining = count
        self._function = function
        self._lock = threading.Lock()

    def count(self, _: Any) -> None:
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
                    f"{closure.name} was given up before it had ended.",
                    expected="no error in another function, which join() or schedule() raises, and "
                    "a coordinator that is not closed before join().",
                    fix="schedule it again when that error is dealt with.",
                )
            )
        )


def _input_error(closure: Closure, failed: RemoteValue) -> ClosureInputError:
    error = ClosureInputError(
        explain(
            f"An input of {closure.name} failed: {failed.error!r}",
            expected="inputs that are there in the end.",
            fix="look at that error first; schedule both functions again.",
        )
    )
    error.__cause__ = failed.error
    return error
