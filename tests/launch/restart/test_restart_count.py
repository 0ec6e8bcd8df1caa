"""How often all is started again: a table of ends."""

from __future__ import annotations

import pytest

from stratagem.launch.restart.restart_count import MAX_SHORT_STARTS, SHORT_S, Restarts
from stratagem.launch.tasks.exit_status import TaskEnd

LONG_S = SHORT_S


def ends(*returncodes: int, lines: tuple[str, ...] = ()) -> list[TaskEnd]:
    return [
        TaskEnd(name=f"worker {index}", returncode=returncode, at_s=1.0, lines=lines)
        for index, returncode in enumerate(returncodes)
    ]


@pytest.mark.parametrize(
    ("before", "returncodes", "ran_s", "after"),
    [
        (Restarts(), (0, 0), LONG_S, None),
        (Restarts(), (0, 1), LONG_S, Restarts(failures=1)),
        (Restarts(failures=1), (-9, 0), 0.0, Restarts(failures=2)),
        (Restarts(failures=2), (-9, 0), LONG_S, None),
        # To leave with 42 is no failure, however often.
        (Restarts(), (42, 42), LONG_S, Restarts(notices=1)),
        (Restarts(failures=2, notices=7), (42, 0), LONG_S, Restarts(failures=2, notices=8)),
        # Unless it is at once, and again, and again.
        (Restarts(), (42,), 0.0, Restarts(notices=1, short_starts=1)),
        (
            Restarts(notices=2, short_starts=MAX_SHORT_STARTS - 1),
            (42,),
            0.0,
            Restarts(failures=1, notices=2, short_starts=MAX_SHORT_STARTS),
        ),
        (Restarts(failures=2, short_starts=MAX_SHORT_STARTS), (42,), 0.0, None),
        # A start that was not short begins to count anew, and so does a failure.
        (Restarts(notices=2, short_starts=2), (42,), LONG_S, Restarts(notices=3)),
        (Restarts(notices=2, short_starts=2), (1,), 0.0, Restarts(failures=1, notices=2)),
    ],
)
def test_next_start(before, returncodes, ran_s, after) -> None:
    assert before.next(ends(*returncodes), ran_s=ran_s, max_restarts=2) == after


def test_tasks_are_told_all_starts() -> None:
    assert Restarts(failures=2, notices=3, short_starts=1).count == 5


def test_tasks_that_leave_at_once_are_not_started_for_ever() -> None:
    restarts, num_starts = Restarts(), 1
    while restarts is not None:
        last = restarts
        restarts = restarts.next(ends(42), ran_s=0.0, max_restarts=4)
        num_starts += 1
    assert (last.failures, num_starts) == (4, 8)
