"""Repeated tracebacks are shown once, and no line is lost."""

from __future__ import annotations

import pytest

from stratagem.launch.tasks.output.screen import RepeatedTracebacks

HEAD = "Traceback (most recent call last):"
FRAMES = [HEAD, '  File "train.py", line 3, in <module>', "    raise ValueError(3)"]
ERROR = [*FRAMES, "ValueError: 3"]


@pytest.fixture
def tracebacks() -> RepeatedTracebacks:
    return RepeatedTracebacks()


def shown_by_second(tracebacks: RepeatedTracebacks, first: list[str], second: list[str]) -> list:
    """What the second task shows, whose lines come one by one."""
    assert tracebacks.pass_on("worker 0", first, 0.0) == first
    shown = [line for one in second for line in tracebacks.pass_on("worker 1", [one], 0.0)]
    return shown + tracebacks.rest("worker 1")


def test_same_traceback_is_shown_once(tracebacks) -> None:
    shown = shown_by_second(tracebacks, ["step 1", *ERROR], ["step 1", *ERROR])
    assert shown == ["step 1", "ValueError: 3 (the same traceback as worker 0)"]


def test_lines_that_differ_after_the_error_are_shown(tracebacks) -> None:
    shown = shown_by_second(tracebacks, [*ERROR, "bye from 0"], [*ERROR, "bye from 1", "end"])
    assert shown == ["ValueError: 3 (the same traceback as worker 0)", "bye from 1", "end"]


@pytest.mark.parametrize(
    "second", [[*FRAMES, "ValueError: 4"], [HEAD, "  other"], [*FRAMES], [HEAD]]
)
def test_traceback_that_differs_is_shown_whole(tracebacks, second) -> None:
    assert shown_by_second(tracebacks, ERROR, second) == second


def test_task_ahead_of_the_first_one_waits_for_it(tracebacks) -> None:
    assert tracebacks.pass_on("worker 0", ERROR[:1], 0.0) == ERROR[:1]
    assert tracebacks.pass_on("worker 1", ERROR, 0.0) == []
    assert tracebacks.pass_on("worker 0", ERROR[1:], 0.5) == ERROR[1:]
    assert tracebacks.overdue("worker 1", 0.9) == []
    assert tracebacks.overdue("worker 1", 1.0) == ["ValueError: 3 (the same traceback as worker 0)"]


def test_task_whose_first_one_stops_is_shown_whole(tracebacks) -> None:
    tracebacks.pass_on("worker 0", ERROR[:2], 0.0)
    tracebacks.pass_on("worker 1", ERROR, 0.0)
    assert tracebacks.overdue("worker 1", 2.0) == ERROR


def test_traceback_of_an_earlier_error_of_the_same_task_is_shown(tracebacks) -> None:
    assert tracebacks.pass_on("worker 0", [*ERROR, *ERROR], 0.0) == [*ERROR, *ERROR]


def test_chained_errors_are_compared_to_the_last_one(tracebacks) -> None:
    link = ["", "The above exception was the direct cause of the following exception:", ""]
    first = [*ERROR, *link, HEAD, "  ...", "RuntimeError: 1"]
    assert shown_by_second(tracebacks, first, first) == [
        "RuntimeError: 1 (the same traceback as worker 0)"
    ]
    other = [*first[:-1], "RuntimeError: 2"]
    assert shown_by_second(RepeatedTracebacks(), first, other) == other


def test_many_lines_do_not_wait(tracebacks) -> None:
    long = [HEAD, *(f"  {number}" for number in range(1_000))]
    assert shown_by_second(tracebacks, long, long) == long
