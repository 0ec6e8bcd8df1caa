"""Decisions about tasks: which failed first, which to stop, to kill, and to start again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from stratagem.cluster.preemption.configuration import EXIT_CODE
from stratagem.launch.plan import SERVERS
from stratagem.launch.tasks.exit_status import ExitStatus

# How long to wait for a better cause after a task has lost a peer: the peer may still be dying.
# After a task that saved and exited, the others have this long to do the same.
SETTLE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskState:
    """State of one task.

    `status` is None while it runs. `is_gone` means that its process and all its children have
    ended. `stopped_at_s` is the time at which its process group was asked to end, if it was. The
    job is done when all tasks with `trains` have ended.
    """

    task_type: str
    trains: bool
    status: ExitStatus | None = None
    is_gone: bool = False
    stopped_at_s: float | None = None


def cause_of_failure(statuses: Sequence[ExitStatus]) -> ExitStatus | None:
    """Returns the task whose failure explains the others, or None if none failed.

    That is the first task that failed by itself; of two at once, the one killed by a signal. Tasks
    that saved and exited come after these, and tasks that lost a peer come last.
    """
    return min(
        _failed(statuses),
        key=lambda status: (_rank(status), status.at_s, status.returncode >= 0),
        default=None,
    )


def failed_by_themselves(statuses: Sequence[ExitStatus]) -> list[ExitStatus]:
    """Returns the tasks that failed, without those that lost a peer."""
    return [status for status in _failed(statuses) if not status.has_lost_peer]


def have_saved_and_left(statuses: Sequence[ExitStatus]) -> bool:
    """Returns True if some tasks saved and exited with `preemption.EXIT_CODE`, and none failed.

    Losing such a task does not count as a failure.
    """
    cause = cause_of_failure(statuses)
    return cause is not None and cause.returncode == EXIT_CODE


def have_survivors(statuses: Sequence[ExitStatus | None]) -> bool:
    """Returns True if a worker runs, which has no status yet, or has ended well."""
    return any(status is None or (status.trains and not status.failed) for status in statuses)


def tasks_to_stop(
    states: Sequence[TaskState],
    now_s: float,
    *,
    evaluator_grace_s: float,
    may_survive: bool = False,
) -> list[int]:
    """Returns the indices of the tasks to stop.

    All after a failure, unless workers `may_survive` it and some do; once the workers have ended,
    the servers, and `evaluator_grace_s` later the evaluator; always those that have ended but left
    processes behind.
    """
    trainers = [state.status for state in states if state.trains]
    survive = may_survive and have_survivors(trainers)
    lost = [one for one in states if survive and one.trains and one.status and one.status.failed]
    failed = _has_failed([one for one in states if one not in lost], now_s)
    statuses = [state.status for state in states if state.trains]
    done_at_s = max((status.at_s for status in statuses if status is not None), default=now_s)
    is_done = all(status is not None and (survive or not status.failed) for status in statuses)

    def is_over(state: TaskState) -> bool:
        if failed or state.status is not None:
            return True
        if not is_done or state.trains:
            return False
        return state.task_type in SERVERS or now_s - done_at_s >= evaluator_grace_s

    return [
        index
        for index, state in enumerate(states)
        if state.stopped_at_s is None and not state.is_gone and is_over(state)
    ]


def tasks_to_kill(states: Sequence[TaskState], now_s: float, *, grace_s: float) -> list[int]:
    """Returns the indices of the tasks that were asked to end `grace_s` ago and still run."""
    return [
        index
        for index, state in enumerate(states)
        if not state.is_gone
        and state.stopped_at_s is not None
        and now_s - state.stopped_at_s >= grace_s
    ]


def _failed(statuses: Sequence[ExitStatus]) -> list[ExitStatus]:
    """Returns the tasks that failed.

    A task with an error that others report has failed, even if it was asked to end before it had.
    """
    peers = [status.lost_peer for status in statuses if status.failed]
    named = {peer.task for peer in peers if peer is not None}
    return [one for one in statuses if one.failed or (one.name in named and one.returncode > 0)]


def _has_failed(states: Sequence[TaskState], now_s: float) -> bool:
    """Returns True if a task has failed and the cause is settled."""
    statuses = [state.status for state in states if state.status is not None]
    cause = cause_of_failure(statuses)
    if cause is None:
        return False
    first_s = min(status.at_s for status in _failed(statuses))
    return _rank(cause) == 0 or now_s - first_s >= SETTLE_S


def _rank(status: ExitStatus) -> int:
    """Ranks failures: those that explain others come first."""
    if status.returncode == EXIT_CODE:
        return 1
    return 2 if status.has_lost_peer else 0


# Restart count: decides whether all tasks are started again.

# Tasks that exit on notice this soon have hardly trained. A notice that never ends, such as on a
# machine about to be taken away, would restart them forever.
SHORT_S = 10.0
MAX_SHORT_STARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartCount:
    """Number of restarts after failures and after notices (tasks that saved and exited).

    `preemptions` counts the notices that the launcher did not give itself, `short_starts`
    consecutive starts that were short and ended after a notice.
    """

    failures: int = 0
    notices: int = 0
    preemptions: int = 0
    short_starts: int = 0

    @property
    def count(self) -> int:
        """All restarts, as the tasks see them."""
        return self.failures + self.notices

    def next(
        self,
        statuses: Sequence[ExitStatus],
        *,
        ran_s: float,
        max_restarts: int,
        max_preemptions: int | None = None,
        were_asked: bool = False,
    ) -> RestartCount | None:
        """Returns the count for the next start, or None if the job is over.

        The tasks ran for `ran_s` seconds; `max_restarts` limits restarts after failures, and
        `max_preemptions` those after preemptions (None: not at all), each for itself; `were_asked`
        means that the launcher had asked the tasks to save and exit.
        """
        if cause_of_failure(statuses) is None:
            is_done = all(status.returncode == 0 for status in statuses if status.trains)
            if is_done or not were_asked:
                return None
            return dataclasses.replace(self, notices=self.notices + 1, short_starts=0)
        left = have_saved_and_left(statuses)
        preemptions = self.preemptions + (left and not were_asked)
        if max_preemptions is not None and preemptions > max_preemptions:
            return None
        is_short = left and ran_s < SHORT_S
        short_starts = self.short_starts + 1 if is_short else 0
        if left and short_starts < MAX_SHORT_STARTS:
            return RestartCount(
                failures=self.failures,
                notices=self.notices + 1,
                preemptions=preemptions,
                short_starts=short_starts,
            )
        if self.failures >= max_restarts:
            return None
        return dataclasses.replace(self, failures=self.failures + 1, short_starts=short_starts)


# Restarts of single processes while the others run.

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Backoff:
    """Delays before a process starts again: none at first, then twice as long each time.

    A run of `stable_s` did not fail at its start, so that delays begin again.
    """

    def __init__(self, stable_s: float) -> None:
        self._stable_s = stable_s
        self._num_in_a_row = 0

    def delay_s(self, ran_s: float = 0.0) -> float:
        """Returns the delay after a run, or after a start that failed."""
        doublings = -1 if ran_s >= self._stable_s else self._num_in_a_row - 1
        self._num_in_a_row = doublings + 2
        return 0.0 if doublings < 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**doublings)


class WorkerRestarts:
    """Decides which lost workers start again, and when.

    One that keeps failing early waits longer each time, up to 30 seconds.
    """

    def __init__(self, max_restarts: int, max_preemptions: int | None = None) -> None:
        self._max_restarts, self._max_preemptions = max_restarts, max_preemptions
        self.num_restarts = self.num_preemptions = 0
        self._is_exhausted = False
        self._backoffs: dict[int, Backoff] = {}
        self._due_s: dict[int, float] = {}

    def note_loss(
        self, worker: int, name: str, *, ran_s: float, now_s: float, saved_and_left: bool = False
    ) -> str:
        """Plans the restart of a lost worker; returns a message about it, or an empty string.

        The message that no restart is left comes once. A worker that `saved_and_left` was
        preempted, unless it hardly ran.
        """
        if saved_and_left and ran_s >= SHORT_S:
            if self._max_preemptions is not None and self.num_preemptions >= self._max_preemptions:
                return f"Not starting {name} again: no restart after a preemption is left."
            self.num_preemptions += 1
            self._plan(worker, ran_s, now_s)
            return f"Starting {name} again; this does not count as a failure."
        most = self._max_restarts
        if not most:
            return ""
        if self.num_restarts >= most:
            is_first, self._is_exhausted = not self._is_exhausted, True
            return f"Not starting {name} again: no restart of {most} is left." if is_first else ""
        self.num_restarts += 1
        delay_s = self._plan(worker, ran_s, now_s)
        after = f" after {delay_s:g} s" if delay_s else ""
        return f"Starting {name} again{after}: restart {self.num_restarts} of {most}."

    def _plan(self, worker: int, ran_s: float, now_s: float) -> float:
        delay_s = self._backoffs.setdefault(worker, Backoff(SHORT_S)).delay_s(ran_s)
        self._due_s[worker] = now_s + delay_s
        return delay_s

    def take_due(self, now_s: float, is_gone: Callable[[int], bool]) -> list[int]:
        """Returns the workers that start now, once; `is_gone` is True if nothing of one is left."""
        due = [one for one, at_s in self._due_s.items() if at_s <= now_s and is_gone(one)]
        for worker in due:
            del self._due_s[worker]
        return due
