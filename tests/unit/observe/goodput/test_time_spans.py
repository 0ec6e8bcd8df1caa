"""Spans of time with the cause that counts first, from layers given by hand."""

from __future__ import annotations

from stratagem.observe.goodput.failures import Failure
from stratagem.observe.goodput.history import (
    CheckpointStall,
    History,
    RetainedSteps,
    Startup,
    StepInterval,
)
from stratagem.observe.goodput.time_spans import CAUSES, MemberChange, Span, spans_of


def interval(begin_s: float, end_s: float, step: int = 10, share: float = 1.0) -> StepInterval:
    return StepInterval(
        begin_s=begin_s,
        end_s=end_s,
        step=step,
        num_steps=1,
        share=share,
        snapshot_share=0.0,
        is_first=False,
    )


def history(
    *intervals: StepInterval,
    stalls: tuple[CheckpointStall, ...] = (),
    startups: tuple[Startup, ...] = (),
) -> History:
    return History(intervals=intervals, resume_points=(), stalls=stalls, startups=startups)


def change(at_s: float, pause_s: float | None, *, joined: tuple[str, ...] = ()) -> MemberChange:
    return MemberChange(
        at_s=at_s,
        lost=() if joined else ("worker 1",),
        joined=joined,
        num_members=2,
        num_expected=3,
        change_s=0.0,
        pause_s=pause_s,
        resumed_s=at_s + (pause_s or 0.0),
    )


def spans(
    *histories: History,
    failures: tuple[Failure, ...] = (),
    changes: tuple[MemberChange, ...] = (),
    first_start_s: float = 0.0,
    end_s: float = 20.0,
) -> list[tuple[float, float, str]]:
    found = spans_of(
        histories,
        failures,
        changes,
        RetainedSteps(()),
        times_s=(0.0, first_start_s, end_s),
    )
    assert all(isinstance(one, Span) and one.cause in CAUSES for one in found)
    return [(one.begin_s, one.end_s, one.cause) for one in found]


def test_without_layers_all_is_waiting() -> None:
    assert spans() == [(0, 20, "waiting")]
    assert spans(end_s=0.0) == []


def test_time_before_the_first_task_is_starting() -> None:
    assert spans(first_start_s=3.0) == [(0, 3, "starting"), (3, 20, "waiting")]


def test_checkpoint_then_loss_then_join_then_step_count() -> None:
    stall = CheckpointStall(begin_s=4.0, end_s=6.0, failed=False)
    found = spans(
        history(interval(2, 18), stalls=(stall,)),
        changes=(change(5, 4.0), change(7, 4.0, joined=("worker 1",))),
    )
    assert found == [
        (0, 2, "waiting"),
        (2, 4, "useful"),
        (4, 6, "saving"),
        (6, 9, "members lost"),
        (9, 11, "members joined"),
        (11, 18, "useful"),
        (18, 20, "waiting"),
    ]


def test_change_of_unknown_length_takes_no_time() -> None:
    assert spans(history(interval(0, 20)), changes=(change(5, None),)) == [(0, 20, "useful")]


def test_start_while_others_train_counts_only_without_a_group() -> None:
    startup = Startup(begin_s=4.0, end_s=16.0, is_start=True)
    trained = history(interval(0, 5), interval(5, 8))
    starting = history(startups=(startup,))
    assert spans(trained, starting) == [
        (0, 8, "useful"),
        (8, 16, "starting"),
        (16, 20, "waiting"),
    ]
    found = spans(trained, starting, changes=(change(1, None),))
    assert found == [(0, 8, "useful"), (8, 20, "waiting")]


def test_start_without_steps_in_it_is_one_of_the_run() -> None:
    """The step from 15 to 17 does not end in it, and the one from 3 to 5 does not begin in it."""
    startup = Startup(begin_s=4.0, end_s=16.0, is_start=True)
    trained = history(interval(3, 5), interval(15, 17))
    found = spans(trained, history(startups=(startup,)), changes=(change(1, None),))
    assert found == [
        (0, 3, "waiting"),
        (3, 5, "useful"),
        (5, 15, "starting"),
        (15, 17, "useful"),
        (17, 20, "waiting"),
    ]


def test_failure_without_a_step_after_it_lasts_to_the_end() -> None:
    failure = Failure(told_s=12.0, what="worker 1", sign_of_life_s=10.0, resumed_s=None)
    assert spans(history(interval(0, 10)), failures=(failure,)) == [
        (0, 10, "useful"),
        (10, 12, "detecting"),
        (12, 20, "restarting"),
    ]
