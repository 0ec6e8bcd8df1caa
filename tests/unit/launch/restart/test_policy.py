"""Decisions about running tasks: a table of states."""

from __future__ import annotations

import pytest

from stratagem.launch.restart.policy import (
    SETTLE_S,
    TaskState,
    cause_of_failure,
    have_saved_and_left,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.tasks.exit_status import ExitStatus

LOST = ("stratagem.errors.UnavailableError: worker 1 is gone.",)
NAMED = (
    "stratagem.errors.UnavailableError: worker 1 (a:1) ended with an error in your code:",
    "Traceback (most recent call last):",
    "OSError: [Errno 28] No space left on device",
)
NOW_S = 100.0


def end(name, returncode=0, at_s=NOW_S, lines=(), **more) -> ExitStatus:
    return ExitStatus(name=name, returncode=returncode, at_s=at_s, lines=lines, **more)


def state(task_type="worker", returncode=None, *, ago_s=0.0, lines=(), **more) -> TaskState:
    """A task that runs, or that ended a while ago and of which nothing is left."""
    trains = task_type in ("chief", "worker")
    if returncode is None:
        return TaskState(task_type=task_type, trains=trains, **more)
    ended = end(task_type, returncode, NOW_S - ago_s, lines)
    return TaskState(task_type=task_type, trains=trains, status=ended, **{"is_gone": True, **more})


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ([], None),
        ([end("a"), end("b")], None),
        ([end("a", 1, 3.0), end("b", 2, 2.0)], "b"),
        # Whoever lost a peer noticed it: it did not begin it, however early it was seen.
        ([end("a", 1, 1.0, LOST), end("b", 1, 2.0)], "b"),
        ([end("a", 1, 1.0, LOST), end("b", -9, 2.0)], "b"),
        ([end("a", 1, 2.0, LOST), end("b", 1, 1.0, LOST), end("c")], "b"),
        # JAX's client aborts when another task has gone.
        ([end("a", -6, 1.0, ("another task died",)), end("b", 1, 2.0)], "b"),
        # Seen at the same moment.
        ([end("a", 1, 1.0), end("b", -11, 1.0)], "b"),
        ([end("a", -9, 1.0), end("b", 1, 1.0)], "a"),
        # Stopped tasks are none, unless a signal ended them that was not sent.
        ([end("a", 1, 1.0, LOST), end("b", 1, 2.0, was_stopped=True)], "a"),
        (
            [
                end("a", 1, 1.0, LOST),
                end("b", -11, 9.0, was_stopped=True, signals=frozenset({15})),
            ],
            "b",
        ),
        # An error that quotes the one of another task is no failure of its own, and the other task
        # failed even if it was told to end while it did.
        ([end("a", 1, 1.0, NAMED), end("worker 1", 1, 2.0)], "worker 1"),
        ([end("a", 1, 1.0, NAMED), end("worker 1", 1, 2.0, was_stopped=True)], "worker 1"),
        ([end("a", 1, 1.0, NAMED), end("worker 2", 1, 2.0, was_stopped=True)], "a"),
        # Whoever saved and left has not failed, if another one has.
        ([end("a", 42, 1.0), end("b", 1, 2.0)], "b"),
        ([end("a", 1, 1.0, LOST), end("b", 42, 2.0)], "b"),
    ],
)
def test_cause_is_the_first_that_failed_by_itself(statuses, cause) -> None:
    found = cause_of_failure(statuses)
    assert (found and found.name) == cause


@pytest.mark.parametrize(
    ("statuses", "left"),
    [
        ([], False),
        ([end("a")], False),
        ([end("a", 42), end("b", 42)], True),
        ([end("a", 42), end("b", 42, lines=LOST)], True),
        ([end("a", 42), end("b", 1, lines=LOST), end("c")], True),
        ([end("a", 42), end("b", -15, was_stopped=True, signals=frozenset({15}))], True),
        ([end("a", 42), end("b", 1)], False),
        ([end("a", 42), end("b", -9)], False),
        ([end("a", 1, lines=LOST)], False),
    ],
)
def test_tasks_have_saved_and_left_if_none_failed_otherwise(statuses, left) -> None:
    assert have_saved_and_left(statuses) is left


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ([state(), state()], []),
        ([state(returncode=0), state()], []),
        ([state(returncode=0), state(), state("ps"), state("evaluator")], []),
        # A failure ends all.
        ([state(returncode=1), state(), state("ps"), state("evaluator")], [1, 2, 3]),
        ([state(), state("ps", returncode=-9)], [0]),
        ([state(), state("evaluator", returncode=1)], [0]),
        # A server may leave when it likes, if it leaves well.
        ([state(), state("ps", returncode=0)], []),
        # Who lost a peer waits for the peer, but not for ever.
        ([state(returncode=1, lines=LOST), state()], []),
        ([state(returncode=1, lines=LOST, ago_s=SETTLE_S), state()], [1]),
        ([state(returncode=1, lines=LOST), state(returncode=-9), state()], [2]),
        # Who saved and left gives the others time to do the same.
        ([state(returncode=42), state()], []),
        ([state(returncode=42, ago_s=SETTLE_S), state()], [1]),
        ([state(returncode=42), state(returncode=1), state()], [2]),
        # The work is done: servers go at once, the evaluator has its time.
        ([state(returncode=0), state("ps"), state("evaluator")], [1]),
        ([state(returncode=0), state("input"), state("evaluator")], [1]),
        ([state(returncode=0, ago_s=60), state("ps"), state("evaluator")], [1, 2]),
        (
            [state(returncode=0, ago_s=60), state(returncode=0, ago_s=59), state("evaluator")],
            [],
        ),
        ([state("chief", 0, ago_s=60), state(), state("evaluator")], []),
        # What a task has left running goes with it, whatever the others do.
        ([state(returncode=0, is_gone=False), state()], [0]),
        # Nobody is told twice.
        ([state(returncode=1), state(stopped_at_s=99.0), state()], [2]),
        ([state(returncode=0, is_gone=False, stopped_at_s=99.0), state()], []),
    ],
)
def test_tasks_are_stopped_when_they_are_to_be(states, stopped) -> None:
    assert tasks_to_stop(states, NOW_S, evaluator_grace_s=60.0) == stopped


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ([state(returncode=-9), state()], []),
        ([state(returncode=-9), state(returncode=1), state()], []),
        # The work is done once one has ended well; no worker is left if none has.
        ([state(returncode=-9), state(returncode=0), state("evaluator")], []),
        ([state(returncode=-9, ago_s=60), state(returncode=0, ago_s=60), state("evaluator")], [2]),
        ([state(returncode=-9), state(returncode=1), state("evaluator")], [2]),
        # Only workers have others to take their place.
        ([state(), state("evaluator", returncode=1)], [0]),
        ([state(returncode=-9), state(), state("ps", returncode=1)], [1]),
    ],
)
def test_workers_survive_others(states, stopped) -> None:
    assert tasks_to_stop(states, NOW_S, evaluator_grace_s=60.0, may_survive=True) == stopped


@pytest.mark.parametrize(
    ("states", "killed"),
    [
        ([state(), state(stopped_at_s=NOW_S - 9.9)], []),
        ([state(), state(stopped_at_s=NOW_S - 10)], [1]),
        ([state(returncode=0, is_gone=False, stopped_at_s=80.0)], [0]),
        ([state(returncode=0, stopped_at_s=80.0)], []),
    ],
)
def test_tasks_that_do_not_end_are_killed(states, killed) -> None:
    assert tasks_to_kill(states, NOW_S, grace_s=10.0) == killed
