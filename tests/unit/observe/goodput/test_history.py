"""Histories of hand-written processes: shares of steps, stalls, startups and lost steps."""

from __future__ import annotations

import pytest

from stratagem.observe.goodput.history import (
    History,
    ResumePoint,
    RetainedSteps,
    StepInterval,
    StepTimes,
    history_of,
)
from stratagem.observe.run_events.records import (
    RestoredEvent,
    SaveEndedEvent,
    SaveStartedEvent,
    StepEvent,
)
from tests.unit.observe.goodput.runs import EPOCH_S, at, process


def step(second: float, number: int, *, elapsed: float, busy: float, count: int = 1) -> StepEvent:
    return StepEvent(
        **at(second),
        step=number,
        num_steps=count,
        elapsed_s=elapsed,
        duration_s=busy,
        keeping_s=0.0,
    )


def interval(begin: float, end: float, last: int, count: int, **changes) -> StepInterval:
    fields = {"share": 1.0, "snapshot_share": 0.0, "is_first": False, **changes}
    return StepInterval(begin_s=begin, end_s=end, step=last, num_steps=count, **fields)


def test_startup_lasts_to_the_end_of_the_first_step_and_resumes_before_it() -> None:
    history = history_of(process("worker 0", 2, step(5, 1, elapsed=2, busy=1)))
    (startup,) = history.startups
    assert (startup.begin_s, startup.end_s, startup.is_start) == (EPOCH_S + 2, EPOCH_S + 5, True)
    assert history.resume_points == (ResumePoint(at_s=EPOCH_S + 2, step=0),)
    (first,) = history.intervals
    assert (first.begin_s, first.share, first.is_first) == (EPOCH_S + 3, 0.5, True)


def test_restored_step_is_where_the_process_resumes() -> None:
    events = (
        RestoredEvent(**at(1), step=7, source="memory"),
        step(3, 8, elapsed=1, busy=1),
        RestoredEvent(**at(4), step=5, source="memory"),
        step(6, 6, elapsed=1, busy=1),
    )
    history = history_of(process("worker 0", 0, *events))
    assert [(p.at_s - EPOCH_S, p.step) for p in history.resume_points] == [(0, 7), (4, 5)]
    assert [one.is_start for one in history.startups] == [True, False]
    assert [one.is_first for one in history.intervals] == [True, True]


def test_process_without_steps_is_starting_to_its_last_event() -> None:
    history = history_of(process("worker 0", 0, RestoredEvent(**at(4), step=3, source="memory")))
    assert history == History(
        intervals=(),
        resume_points=(ResumePoint(at_s=EPOCH_S, step=3),),
        stalls=(),
        startups=history.startups,
    )
    assert history.startups[0].end_s == EPOCH_S + 4


def test_stalls_are_no_longer_than_their_saves_and_do_not_count_in_steps() -> None:
    events = (
        step(1, 1, elapsed=1, busy=1),
        SaveStartedEvent(**at(2), step=1, is_asynchronous=False),
        SaveEndedEvent(
            **at(4), step=1, duration_s=2.0, stall_s=9.0, is_asynchronous=False, failed=None
        ),
        step(5, 2, elapsed=4, busy=2),
    )
    history = history_of(process("worker 0", 0, *events))
    (stall,) = history.stalls
    assert (stall.begin_s - EPOCH_S, stall.end_s - EPOCH_S, stall.failed) == (2, 4, False)
    assert history.intervals[1].share == 1.0, "2 s of steps in 4 s with a stall of 2 s"


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], 4),
        ([(5, 8)], 4),  # before the end of the steps
        ([(20, 10)], 4),
        ([(20, 8)], 2),
        ([(20, 6)], 0),
        ([(20, 3)], 0),
        ([(20, 9), (30, 7)], 1),  # the lowest of all later ones
    ],
    ids=str,
)
def test_steps_after_a_later_resume_point_are_lost(points, expected) -> None:
    retained = RetainedSteps(ResumePoint(at_s=time, step=number) for time, number in points)
    assert retained.num_useful(interval(0, 10, 10, 4)) == expected


def test_steps_of_an_interval_are_evenly_spaced() -> None:
    times = StepTimes([interval(0, 8, 4, 4), interval(8, 9, 5, 1)])
    assert [times.last_s(time) for time in (1, 2, 5, 8, 8.5, 20)] == [None, 2, 4, 8, 8, 9]
    assert [times.next_s(time) for time in (-1, 1, 2, 7, 8, 9)] == [2, 2, 4, 8, 9, None]
    first = StepTimes([interval(0, 8, 4, 4, is_first=True)])
    assert first.next_s(1) == 8, "the first steps after a start are not spread"
