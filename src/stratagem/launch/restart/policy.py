"""What to do with a group of tasks: decided here, carried out in `group.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stratagem.launch.tasks.exit_status import TaskEnd, lost_a_peer
from stratagem.preemption import EXIT_CODE

__all__ = [
    "TaskState",
    "cause_of_failure",
    "have_saved_and_left",
    "tasks_to_kill",
    "tasks_to_stop",
]

# How long a task that has lost a peer may be the only one that failed: the peer may still be busy
# dying, and it is the one to name. One that has saved and left leaves the others as long to do so.
SETTLE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskState:
    """Where one task stands.

    Args:
        task_type: chief, worker, ps or evaluator.
        trains: the work is done when all such tasks have ended.
        end: how it ended; None while it runs.
        is_gone: nothing of it runs any more, its own children included.
        stopped_at_s: when it, or what it left running, was told to end; None if it was not.
    """

    task_type: str
    trains: bool
    end: TaskEnd | None = None
    is_gone: bool = False
    stopped_at_s: float | None = None


def cause_of_failure(ends: Sequence[TaskEnd]) -> TaskEnd | None:
    """Returns the task whose failure explains the others'.

    Args:
        ends: the tasks that have ended, in their own order.

    Returns:
        The first in time of those that failed by themselves, and of two at once one that a signal
        killed. One that has saved and left only if there is no such, and one that lost a peer if
        there is no other at all. None if none failed.
    """
    return min(
        (end for end in ends if end.failed),
        key=lambda end: (_rank(end), end.at_s, end.returncode >= 0),
        default=None,
    )


def have_saved_and_left(ends: Sequence[TaskEnd]) -> bool:
    """Returns whether all that is to be said of the tasks is: saved, start me again.

    Args:
        ends: the tasks that have ended.

    Returns:
        True if some left with `preemption.EXIT_CODE`, and the others ended well, were stopped, or
        lost those that left.
    """
    cause = cause_of_failure(ends)
    return cause is not None and cause.returncode == EXIT_CODE


def tasks_to_stop(
    states: Sequence[TaskState], now_s: float, *, evaluator_grace_s: float
) -> list[int]:
    """Returns which tasks are to be told to end.

    All, after a failure. Servers when the workers have ended, and the evaluator a while later. A
    task that has ended itself, but has left processes of its own.

    Args:
        states: the tasks.
        now_s: the time.
        evaluator_grace_s: how long the evaluator may go on without the workers.

    Returns:
        Their places in `states`.
    """
    failed = _is_to_fail(states, now_s)
    ends = [state.end for state in states if state.trains]
    done_at_s = max((end.at_s for end in ends if end is not None), default=now_s)
    is_done = all(end is not None and not end.failed for end in ends)

    def is_over(state: TaskState) -> bool:
        if failed or state.end is not None:
            return True
        if not is_done or state.trains:
            return False
        return state.task_type == "ps" or now_s - done_at_s >= evaluator_grace_s

    return [
        place
        for place, state in enumerate(states)
        if state.stopped_at_s is None and not state.is_gone and is_over(state)
    ]


def tasks_to_kill(states: Sequence[TaskState], now_s: float, *, grace_s: float) -> list[int]:
    """Returns which tasks were told to end and have taken too long.

    Args:
        states: the tasks.
        now_s: the time.
        grace_s: how long they may take.

    Returns:
        Their places in `states`.
    """
    return [
        place
        for place, state in enumerate(states)
        if not state.is_gone
        and state.stopped_at_s is not None
        and now_s - state.stopped_at_s >= grace_s
    ]


def _is_to_fail(states: Sequence[TaskState], now_s: float) -> bool:
    """Whether some task has failed, and it is clear enough which one is the cause."""
    ends = [state.end for state in states if state.end is not None]
    cause = cause_of_failure(ends)
    if cause is None:
        return False
    first_s = min(end.at_s for end in ends if end.failed)
    return _rank(cause) == 0 or now_s - first_s >= SETTLE_S


def _rank(end: TaskEnd) -> int:
    """What explains other failures comes first."""
    if end.returncode == EXIT_CODE:
        return 1
    return 2 if lost_a_peer(end.lines) else 0
