"""Restarts for tables of exit statuses."""

from __future__ import annotations

import pytest

from stratagem.launch.restart.restart_count import MAX_SHORT_STARTS, SHORT_S, RestartCount
from stratagem.launch.tasks.exit_status import ExitStatus

LONG_S = SHORT_S


def statuses(*returncodes: int, lines: tuple[str, ...] = ()) -> list[ExitStatus]:
    return [
        ExitStatus(name=f"worker {index}", returncode=returncode, at_s=1.0, lines=lines)
        for index, returncode in enumerate(returncodes)
    ]


@pytest.mark.parametrize(
    ("before", "returncodes", "ran_s", "after"),
    [
        (RestartCount(), (0, 0), LONG_S, None),
        (RestartCount(), (0, 1), LONG_S, RestartCount(failures=1)),
        (RestartCount(failures=1), (-9, 0), 0.0, RestartCount(failures=2)),
        (RestartCount(failures=2), (-9, 0), LONG_S, None),
        # To leave with 42 is no failure, however often.
        (RestartCount(), (42, 42), LONG_S, RestartCount(notices=1)),
        (RestartCount(failures=2, notices=7), (42, 0), LONG_S, RestartCount(failures=2, notices=8)),
        # Unless it is at once, and again, and again.
        (RestartCount(), (42,), 0.0, RestartCount(notices=1, short_starts=1)),
        (
            RestartCount(notices=2, short_starts=MAX_SHORT_STARTS - 1),
            (42,),
            0.0,
            RestartCount(failures=1, notices=2, short_starts=MAX_SHORT_STARTS),
        ),
        (RestartCount(failures=2, short_starts=MAX_SHORT_STARTS), (42,), 0.0, None),
        # A start that was not short begins to count anew, and so does a failure.
        (RestartCount(notices=2, short_starts=2), (42,), LONG_S, RestartCount(notices=3)),
        (RestartCount(notices=2, short_starts=2), (1,), 0.0, RestartCount(failures=1, notices=2)),
    ],
)
def test_next_start(before, returncodes, ran_s, after) -> None:
    assert before.next(statuses(*returncodes), ran_s=ran_s, max_restarts=2) == after


def test_tasks_learn_all_starts() -> None:
    assert RestartCount(failures=2, notices=3, short_starts=1).count == 5


def test_tasks_that_leave_at_once_are_not_started_for_ever() -> None:
    restarts, num_starts = RestartCount(), 1
    while restarts is not None:
        last = restarts
        restarts = restarts.next(statuses(42), ran_s=0.0, max_restarts=4)
        num_starts += 1
    assert (last.failures, num_starts) == (4, 8)
