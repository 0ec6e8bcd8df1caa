"""Members that are lost and join again, against figures computed by hand."""

from __future__ import annotations

import pytest

from stratagem.observe.events import Event, RunEvents
from stratagem.observe.goodput import Account, account_for, lost_processes, member_changes
from tests.unit.observe.runs import (
    EPOCH_S,
    account_of,
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
        *first.processes, process("worker 0", later_s, *again), process("worker 1", later_s, *again)
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
