"""Members that are lost and join again, against figures computed by hand."""

from __future__ import annotations

import pytest

from stratagem.observe.events import Event, RunEvents, SaveEndedEvent, SaveStartedEvent
from stratagem.observe.goodput import (
    CAUSES,
    Account,
    MemberChange,
    Span,
    account_for,
    lost_processes,
    member_changes,
    spans_of,
)
from stratagem.observe.history import (
    CheckpointStall,
    Failure,
    History,
    ResumePoint,
    RetainedSteps,
    Startup,
    StepInterval,
    StepTimes,
    history_of,
)
from tests.unit.observe.runs import (
    EPOCH_S,
    account_of,
    at,
    end,
    failure,
    first_step,
    members,
    members_come_and_go,
    parts,
    process,
    restart,
    restored,
    run,
    steps,
)


def changes_of(account: Account) -> list[tuple[float, tuple[str, ...], tuple[str, ...], int]]:
    return [
        (round(one.at_s, 6), one.lost, one.joined, one.num_members)
        for one in account.member_changes
    ]


def test_pauses_are_counted_once_and_the_rest_is_useful() -> None:
    """Fifty seconds of steps, with pauses of 1, 0.5, 1.5 and 0.5 s in them."""
    account = account_for(members_come_and_go())
    assert parts(account) == {
        "starting": 10,
        "useful": 50 - 3.5,
        "members lost": 1 + 1.5,
        "members joined": 0.5 + 0.5,
        "waiting": 3,
    }
    assert (account.num_steps, account.num_repeated) == (94, 0)
    assert account.failures == ()
    assert account.is_over
    assert account.goodput_after_startup == pytest.approx(46.5 / 53)


def test_each_change_of_the_run_is_there_once() -> None:
    account = account_for(members_come_and_go())
    one = ("worker 1",)
    assert changes_of(account) == [
        (5, (), (), 3),
        (20, one, (), 2),
        (30, (), one, 3),
        (40, one, (), 2),
        (50, (), one, 3),
    ]
    assert [change.cause for change in account.member_changes] == [
        None,
        "members lost",
        "members joined",
        "members lost",
        "members joined",
    ]
    assert [change.pause_s for change in account.member_changes] == [None, 1.0, 0.5, 1.5, 0.5]
    values = account.as_dict()["member_changes"][1]
    assert (values["lost"], values["pause_s"], values["resumed_s"]) == (one, 1.0, 21.5)


def test_processes_that_differ_count_as_the_longest_one() -> None:
    """Worker 0 reports a pause from 10 to 12, worker 2 one from 10.25 to 11.5."""

    def lines(pause_s: float, resumed_s: float) -> tuple[Event, ...]:
        return (
            *(first_step(1, 1), steps(1, 10, 2, 10)),
            *(members(resumed_s, 1, 2, lost="1", pause_s=pause_s), steps(10, resumed_s, 11, 11)),
            *(steps(resumed_s, 20, 12, 20), end(20)),
        )

    account = account_of(
        process("worker 0", 0, *lines(2.0, 12.5)),
        process("worker 1", 0, *lines(2.0, 12.5)[:2]),
        process("worker 2", 0, *lines(1.25, 12.0)),
    )
    assert parts(account) == {"starting": 1, "useful": 17, "members lost": 2}
    assert changes_of(account) == [(10, ("worker 1",), (), 2)]


def overlapping() -> RunEvents:
    """A loss from second 10 to 14 and a join from 13 to 16, as processes with two views see it."""
    both = (
        *(first_step(1, 1), steps(1, 10, 2, 10), members(14.5, 1, 2, lost="1", pause_s=4.0)),
        *(members(16.5, 2, 3, joined="1", pause_s=3.0), steps(10, 16.5, 11, 12)),
        *(steps(16.5, 20, 13, 19), end(20)),
    )
    return run(
        process("worker 0", 0, *both),
        process("worker 1", 0, *both[:2]),
        process("worker 2", 0, *both),
        process("worker 1", 11, first_step(16.5, 12), *both[-2:], attempt=1),
    )


def test_moments_of_two_pauses_count_for_the_loss() -> None:
    account = account_for(overlapping())
    assert parts(account) == {
        "starting": 1,
        "useful": 9 + 4,
        "members lost": 4,
        "members joined": 2,
    }


def test_process_that_joins_in_the_change_of_a_loss_belongs_to_the_loss() -> None:
    stayed = (
        *(first_step(2, 1), steps(2, 10, 2, 17)),
        *(members(11, 1, 2, lost="0", joined="2", pause_s=0.5), steps(10, 11, 18, 18)),
        *(steps(11, 20, 19, 36), end(20)),
    )
    account = account_of(
        process("worker 0", 0, *stayed[:2]),
        process("worker 1", 0, *stayed),
        process("worker 2", 0, first_step(11, 18), *stayed[-2:]),
    )
    # It has waited from second 0 to 11, in which the others trained.
    assert parts(account) == {"starting": 2, "useful": 17.5, "members lost": 0.5}
    assert account.failures == ()
    assert account.is_over


def test_waiting_while_another_process_starts_is_no_start_of_the_run() -> None:
    """The survivor evaluates from second 20 to 24, and worker 1 starts from 12 to 26."""
    stayed = (
        *(first_step(1, 1), steps(1, 10, 2, 10), members(11, 1, 1, lost="1", pause_s=0.5)),
        *(steps(10, 11, 11, 11), steps(11, 15, 12, 15), steps(15, 20, 16, 20)),
        *(steps(24, 25, 21, 21), members(26, 2, 2, joined="1", pause_s=0.5), steps(25, 26, 22, 22)),
        end(26),
    )
    account = account_of(
        process("worker 0", 0, *stayed),
        process("worker 1", 0, *stayed[:2]),
        process("worker 1", 12, first_step(26, 22), end(26), attempt=1),
    )
    assert parts(account) == {
        "starting": 1,
        "useful": 20 - 0.5 + 0.5,
        "members lost": 0.5,
        "members joined": 0.5,
        "waiting": 4,
    }


def test_member_that_fails_with_an_error_is_no_failure_of_the_run() -> None:
    stayed = (
        *(first_step(1, 1), steps(1, 10, 2, 10), members(11, 1, 2, lost="1", pause_s=0.5)),
        *(steps(10, 11, 11, 11), end(11)),
    )
    lost = process("worker 1", 0, *stayed[:2], end(10.25, 1, "ValueError: bad"))
    account = account_of(process("worker 0", 0, *stayed), lost)
    assert account.failures == ()
    without = run(process("worker 0", 0, *stayed[:2]), lost)
    assert [one.what for one in account_for(without).failures] == ["worker 1: ValueError: bad"]


def test_end_of_all_members_is_a_failure() -> None:
    """Worker 1 is lost at 10; worker 0 dies at 20, and the launcher starts both again."""
    account = account_of(
        process("launcher 0", 0, failure(20.5, "worker 0"), restart(21, 1), end(40)),
        process(
            *("worker 0", 0, first_step(1, 1), steps(1, 10, 2, 10)),
            *(members(11, 1, 1, lost="1", pause_s=0.5), steps(10, 11, 11, 11)),
            steps(11, 20, 12, 20),
        ),
        process("worker 1", 0, first_step(1, 1), steps(1, 10, 2, 10)),
        *(
            process(
                *(f"worker {index}", 22, restored(24, 20), first_step(25, 21)),
                *(steps(25, 40, 22, 36), end(40)),
                attempt=1,
            )
            for index in range(2)
        ),
    )
    assert parts(account) == {
        "starting": 1,
        "useful": 9 + 10 - 0.5 + 15,
        "members lost": 0.5,
        "detecting": 0.5,
        "restarting": 4.5,
    }
    assert [one.what for one in account.failures] == ["worker 0 lost"]
    assert (account.num_steps, account.num_repeated) == (36, 0)


def test_groups_of_two_launches_are_apart() -> None:
    """Both have a view with number 1."""
    first = members_come_and_go()
    later_s = 100.0

    again = (
        first_step(later_s + 10, 1),
        members(later_s + 21.5, 1, 2, lost="2", pause_s=1.0),
        end(later_s + 30),
    )
    events = run(
        *first.processes,
        process("worker 0", later_s, *again),
        process("worker 1", later_s, *again),
    )
    trainers = [one for one in events.processes if one.trains]
    found = member_changes(trainers)
    assert [(change.at_s - EPOCH_S, change.lost) for change in found][-1] == (120, ("worker 2",))
    assert len(found) == 5 + 1


def test_lost_process_is_the_one_before_a_process_that_joined_at_once() -> None:
    """Worker 1 starts again at 10.1, and both are in the step that ends at 12."""
    stayed = (
        *(first_step(1, 1), steps(1, 10, 2, 10)),
        *(members(12, 1, 2, lost="1", joined="1", pause_s=1.5), steps(10, 12, 11, 11)),
    )
    before = process("worker 1", 0, *stayed[:2])
    again = process("worker 1", 10.1, first_step(12, 11), attempt=1)
    events = run(process("worker 0", 0, *stayed), before, again)
    changes = member_changes(events.processes)
    assert lost_processes(events.processes, changes) == {before.start}
    assert account_for(events).failures == ()


def test_process_that_is_lost_before_its_first_step() -> None:
    stayed = (
        *(first_step(1, 1), steps(1, 10, 2, 10), members(12, 1, 1, lost="1", pause_s=1.5)),
        *(steps(12, 13, 11, 11), members(20, 3, 1, lost="1", joined="1", pause_s=1.5)),
        steps(19, 20, 12, 12),
    )
    before = process("worker 1", 0, *stayed[:2])
    again = process("worker 1", 13, attempt=1)
    third = process("worker 1", 21, attempt=2)
    events = run(process("worker 0", 0, *stayed), before, again, third)
    changes = member_changes(events.processes)
    assert lost_processes(events.processes, changes) == {before.start, again.start}
    assert account_for(events).failures == ()


@pytest.mark.parametrize(
    ("lost", "joined", "pause_s", "cause"),
    [
        ((), (), None, None),
        ((), (), 1.0, "members lost"),  # a connection was lost, and no member
        (("worker 1",), (), None, "members lost"),
        (("worker 1",), ("worker 3",), 1.0, "members lost"),
        ((), ("worker 1",), 1.0, "members joined"),
    ],
)
def test_cause_of_a_change(lost, joined, pause_s, cause) -> None:
    assert change(0.0, pause_s, lost=lost, joined=joined).cause == cause


# Spans of time with the cause that counts first, from layers given by hand.


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


def change(
    at_s: float,
    pause_s: float | None,
    *,
    lost: tuple[str, ...] = ("worker 1",),
    joined: tuple[str, ...] = (),
) -> MemberChange:
    return MemberChange(
        at_s=at_s,
        lost=lost,
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
    end_s: float = 20.0,
) -> list[tuple[float, float, str]]:
    found = spans_of(
        histories,
        failures,
        changes,
        RetainedSteps(()),
        times_s=(0.0, 0.0, end_s),
    )
    assert all(isinstance(one, Span) and one.cause in CAUSES for one in found)
    return [(one.begin_s, one.end_s, one.cause) for one in found]


def test_without_layers_all_is_waiting() -> None:
    assert spans() == [(0, 20, "waiting")]
    assert spans(end_s=0.0) == []


def test_checkpoint_then_loss_then_join_then_step_count() -> None:
    stall = CheckpointStall(begin_s=4.0, end_s=6.0, failed=False)
    found = spans(
        history(interval(2, 18), stalls=(stall,)),
        changes=(change(5, 4.0), change(7, 4.0, lost=(), joined=("worker 1",))),
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


# Histories of hand-written processes: shares of steps, stalls, startups and lost steps.


def interval_of_history(begin: float, end: float, last: int, count: int, **changes) -> StepInterval:
    fields = {"share": 1.0, "snapshot_share": 0.0, "is_first": False, **changes}
    return StepInterval(begin_s=begin, end_s=end, step=last, num_steps=count, **fields)


def test_startup_lasts_to_the_end_of_the_first_step_and_resumes_before_it() -> None:
    history = history_of(process("worker 0", 2, steps(3, 5, 1, 1, busy=1)))
    (startup,) = history.startups
    assert (startup.begin_s, startup.end_s, startup.is_start) == (EPOCH_S + 2, EPOCH_S + 5, True)
    assert history.resume_points == (ResumePoint(at_s=EPOCH_S + 2, step=0),)
    (first,) = history.intervals
    assert (first.begin_s, first.share, first.is_first) == (EPOCH_S + 3, 0.5, True)


def test_restored_step_is_where_the_process_resumes() -> None:
    events = (
        restored(1, 7),
        steps(2, 3, 8, 8),
        restored(4, 5),
        steps(5, 6, 6, 6),
    )
    history = history_of(process("worker 0", 0, *events))
    assert [(p.at_s - EPOCH_S, p.step) for p in history.resume_points] == [(0, 7), (4, 5)]
    assert [one.is_start for one in history.startups] == [True, False]
    assert [one.is_first for one in history.intervals] == [True, True]


def test_process_without_steps_is_starting_to_its_last_event() -> None:
    history = history_of(process("worker 0", 0, restored(4, 3)))
    assert history == History(
        intervals=(),
        resume_points=(ResumePoint(at_s=EPOCH_S, step=3),),
        stalls=(),
        startups=history.startups,
    )
    assert history.startups[0].end_s == EPOCH_S + 4


def test_stalls_are_no_longer_than_their_saves_and_do_not_count_in_steps() -> None:
    events = (
        steps(0, 1, 1, 1),
        SaveStartedEvent(**at(2), step=1, is_asynchronous=False),
        SaveEndedEvent(
            **at(4), step=1, duration_s=2.0, stall_s=9.0, is_asynchronous=False, failed=None
        ),
        steps(1, 5, 2, 2, busy=2),
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
    assert retained.num_useful(interval_of_history(0, 10, 10, 4)) == expected


def test_steps_of_an_interval_are_evenly_spaced() -> None:
    times = StepTimes([interval_of_history(0, 8, 4, 4), interval_of_history(8, 9, 5, 1)])
    assert [times.last_s(time) for time in (1, 2, 5, 8, 8.5, 20)] == [None, 2, 4, 8, 8, 9]
    assert [times.next_s(time) for time in (-1, 1, 2, 7, 8, 9)] == [2, 2, 4, 8, 9, None]
    first = StepTimes([interval_of_history(0, 8, 4, 4, is_first=True)])
    assert first.next_s(1) == 8, "the first steps after a start are not spread"
