"""Queue of scheduled functions that have not finished: queued, waiting for inputs, or running.

Source: TF 2.21 cluster_coordinator.py, _CoordinatedClosureQueue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from stratagem.errors import CancelledError, explain
from stratagem.parameter_server.coordinator.remote_value import (
    Closure,
    Countdown,
    RemoteValue,
    cancel,
    input_error,
)
from stratagem.parameter_server.coordinator.shipping import merge_reports

# Threads of workers that wait for closures, each woken alone: waking all threads for each closure
# would cost the square of the number of workers.


class WaitingWorkers:
    """Workers that wait for closures. Call it while holding `lock`.

    Idle workers come before busy ones, which already run a closure.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._bells: dict[int, threading.Condition] = {}
        self._idle: dict[int, None] = {}
        self._busy: dict[int, Callable[[], bool]] = {}
        self._coming: set[int] = set()  # woken by `wake_one`

    def wait(self, worker: int, is_busy: Callable[[], bool]) -> None:
        """Releases the lock until the worker is woken."""
        if is_busy():
            self._busy[worker] = is_busy
        else:
            self._idle[worker] = None
        if worker not in self._bells:
            self._bells[worker] = threading.Condition(self._lock)
        self._bells[worker].wait()
        self._coming.discard(worker)

    def wake(self, worker: int) -> None:
        """Wakes a worker, if it waits."""
        is_waiting = worker in self._idle or worker in self._busy
        self._idle.pop(worker, None)
        self._busy.pop(worker, None)
        if is_waiting:
            self._bells[worker].notify_all()

    def wake_one(self, *, may_be_busy: bool) -> None:
        """Wakes one worker, unless one is about to return from its wait.

        That is the last idle worker, else, if it may be busy, the last busy one: short functions
        then keep few workers busy with many at once.
        """
        if self._coming:
            return
        workers = self._idle or (self._busy if may_be_busy else None)
        if workers:
            worker = next(reversed(workers))
            self._coming.add(worker)
            self.wake(worker)

    def wake_all(self) -> None:
        """Wakes all workers."""
        for worker in [*self._idle, *self._busy]:
            self.wake(worker)

    def note_finished(self, worker: int) -> None:
        """Counts a waiting worker as idle if it has nothing left to run."""
        is_busy = self._busy.get(worker)
        if is_busy is not None and not is_busy():
            del self._busy[worker]
            self._idle[worker] = None


MAX_CLOSURES = 256 * 1024
# Limits of a group, in closures and in seconds: results wait for the last one of their group. The
# second limit holds within a worker's share of the queue.
MAX_GROUP = 64
_GROUP_S, _SHARE_S = 2e-3, 30e-3


class ClosureQueue:
    """Queue of closures, started in the order in which they were scheduled.

    An error cancels all closures that have not started. Once none is running, `put`, `wait` or
    `is_done` raises it once, and the queue accepts closures again. `put` blocks while `capacity`
    closures have not started. `num_workers` is the number of workers that share the queue.
    """

    def __init__(self, capacity: int = MAX_CLOSURES) -> None:
        self._capacity = capacity
        self.num_workers = 1
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)  # for `put`
        self._stopped = threading.Condition(self._lock)  # nothing is running
        self._workers = WaitingWorkers(self._lock)
        self._counting = threading.Lock()
        self._line: deque[Closure] = deque()
        self._own: dict[int, deque[Closure]] = {}  # closures bound to one worker
        self._num_queued = 0
        self._gone: dict[int | None, BaseException] = {}  # permanently lost workers
        self._waiting: OrderedDict[int, Closure] = OrderedDict()  # for inputs
        self._num_running = 0
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of closures per state: queued, waiting for inputs, running, and succeeded."""
        with self._lock:
            return {
                "queued": self._num_queued,
                "waiting": len(self._waiting),
                "running": self._num_running,
                "done": self._num_done,
            }

    def num_queued_for(self, workers: Iterable[int]) -> int:
        """Returns the number of queued closures that at least one of `workers` may run."""
        with self._lock:
            return len(self._line) + sum(len(self._own.get(worker, ())) for worker in workers)

    def put(self, closure: Closure) -> None:
        """Adds a closure; blocks while the queue is full.

        Raises:
            BaseException: the error of an earlier closure.
            RuntimeError: the coordinator is closed.
        """
        with self._lock:
            self._room.wait_for(
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
        remaining = Countdown(len(missing), lambda: self._start(closure))
        for value in missing:
            value.observe(remaining.count)

    def take(
        self,
        worker: int,
        is_busy: Callable[[], bool] = lambda: False,
        *,
        expected_s: Callable[[Closure], float] | None = None,
    ) -> list[Closure]:
        """Blocks until `worker` can start a closure; returns no closure once the queue is closed.

        If `is_busy()` is True, the worker takes shared work only if more closures are queued than
        there are workers, so that idle workers come first. With `expected_s`, the duration of a
        closure in seconds, it takes up to half of those queued if they take 2 ms together, and its
        share of half of them if they take 30 ms.
        """
        with self._lock:
            own = self._own.setdefault(worker, deque())
            while not (
                self._is_closed or own or len(self._line) > (self.num_workers if is_busy() else 0)
            ):
                self._wake_for_line()
                self._workers.wait(worker, is_busy)
            if self._is_closed:
                return []
            num_takers = 1 if own else self.num_workers
            taken = _group(own or self._line, expected_s, num_takers)
            for closure in taken:
                closure.num_starts += 1
                closure.runner = worker
            self._num_queued -= len(taken)
            self._num_running += len(taken)
            self._room.notify(len(taken))
            self._wake_for_line()
            return taken

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
        with self._lock:
            self._num_done += 1
            self._note_end(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Records the error of a running closure and cancels all closures that have not started."""
        # First the queue: aborting the result fails dependents, and this is the error to report.
        with self._lock:
            if self._error is not None:
                merge_reports(self._error, error)
            given_up = self._give_up(error)
        closure.result.abort(error)
        cancel(given_up, error)
        with self._lock:
            self._note_end(closure)

    def put_back(self, closure: Closure) -> None:
        """Puts a closure whose worker was lost back at the front of the queue."""
        closure.result.abort(None)
        with self._lock:
            is_given_up = self._error is not None or self._is_closed
            if not is_given_up:
                self._line_of(closure).appendleft(closure)
                self._num_queued += 1
            self._note_end(closure)
            if not is_given_up:
                self._wake(closure.worker)
        if is_given_up:
            cancel([closure], self._error)
        elif gone := self._gone_error(closure.worker):
            self.break_all(gone)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is queued or running; returns False after `timeout_s` seconds.

        Raises:
            BaseException: the first error of a closure.
        """
        with self._lock:
            is_over = self._stopped.wait_for(lambda: self._is_idle, timeout_s)
            if is_over:
                self._raise_error()
            return is_over

    def is_done(self) -> bool:
        """Returns True if nothing is queued or running. Does not wait.

        Raises:
            BaseException: the first error of a closure, once none is running.
        """
        with self._lock:
            if self._num_running:
                return False
            self._raise_error()
            return self._is_idle

    def close(self) -> None:
        """Unblocks all waiting threads and cancels closures that have not started."""
        with self._lock:
            self._is_closed = True
            given_up = self._take_all()
            self._workers.wake_all()
        cancel(given_up)

    def break_all(self, error: BaseException) -> None:
        """Cancels all closures because of an error elsewhere, such as the loss of a server."""
        with self._lock:
            given_up = self._give_up(error)
        cancel(given_up, error)

    def lose_worker(self, worker: int | None, error: BaseException) -> None:
        """Marks a worker as permanently lost; None is all of them.

        If it is all of them, or closures bound to it are queued, all closures are cancelled because
        of `error`.
        """
        with self._lock:
            self._gone[worker] = error
            is_wanted = worker is None or bool(self._own.get(worker))
        if is_wanted:
            self.break_all(error)

    def find_worker(self, worker: int) -> None:
        """Marks a permanently lost worker as available again."""
        with self._lock:
            self._gone.pop(worker, None)
            self._gone.pop(None, None)

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
        self._line_of(closure).append(closure)
        self._num_queued += 1
        self._wake(closure.worker)

    def _line_of(self, closure: Closure) -> deque[Closure]:
        if closure.worker is None:
            return self._line
        return self._own.setdefault(closure.worker, deque())

    def _wake(self, worker: int | None) -> None:
        """Wakes the only worker that may run a queued closure, or one of all."""
        if worker is not None:
            self._workers.wake(worker)
        else:
            self._wake_for_line()

    def _wake_for_line(self) -> None:
        """Wakes a worker for shared closures; once it has taken some, it wakes the next one."""
        if self._line:
            self._workers.wake_one(may_be_busy=len(self._line) > self.num_workers)

    def _note_end(self, closure: Closure) -> None:
        """Counts a closure that runs no more."""
        self._num_running -= 1
        self._workers.note_finished(closure.runner)
        self._wake_for_line()  # its worker, while busy, left closures to idle ones
        if not self._num_running:
            self._stopped.notify_all()

    def _start(self, closure: Closure) -> None:
        """Queues a closure whose inputs are settled, or fails it if one of them failed."""
        failed = next((one for one in closure.inputs if not _is_there(one)), None)
        with self._lock:
            if self._waiting.pop(id(closure), None) is None:
                return  # already cancelled
            error = self._gone_error(closure.worker)
            if failed is not None:
                error = input_error(closure, failed)
            if error is None:
                self._append(closure)
                return
            given_up = self._give_up(error)
        closure.result.abort(error)
        cancel(given_up, error)

    def _give_up(self, error: BaseException) -> list[Closure]:
        # Cancellations follow from another error.
        if self._error is None and not isinstance(error, CancelledError):
            self._error = error
        return self._take_all()

    def _take_all(self) -> list[Closure]:
        given_up = [*self._line, *self._waiting.values()]
        given_up += [closure for line in self._own.values() for closure in line]
        self._line.clear()
        self._waiting.clear()
        for line in self._own.values():
            line.clear()
        self._num_queued = 0
        self._room.notify_all()
        if not self._num_running:
            self._stopped.notify_all()
        return given_up

    def _raise_error(self) -> None:
        """Raises an error once, after the running closures have finished."""
        if self._error is not None:
            self._stopped.wait_for(lambda: not self._num_running)
        error, self._error = self._error, None
        if error is not None:  # None: another thread has raised it
            raise error


def _group(
    line: deque[Closure], expected_s: Callable[[Closure], float] | None, num_takers: int
) -> list[Closure]:
    """Removes the next closures from a line that workers share: one, or several that are short."""
    group = [line.popleft()]
    if expected_s is None:
        return group
    most = len(line) // 2
    total_s = expected_s(group[0])
    for place in range(min(MAX_GROUP - 1, most)):
        total_s += expected_s(line[0])
        if total_s > (_SHARE_S if place < most // num_takers else _GROUP_S):
            break
        group.append(line.popleft())
    return group


def _is_there(value: RemoteValue) -> bool:
    return value.status.name == "READY"
