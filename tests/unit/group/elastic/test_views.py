"""Processes that are started again and join an elastic group that runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from typing import Any

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.elastic import rounds
from stratagem.group.elastic import views as group_messages
from stratagem.group.elastic.peer_connections import PeerLostError
from stratagem.group.elastic.rounds import TrainingPauses
from stratagem.group.elastic.views import Report, View, next_view, with_newcomers
from stratagem.observe.run_events.records import MembersEvent
from tests.unit.group.elastic.members import PLACE, Step, Training, members_of
from tests.unit.observe.run_events.test_wait_clock import ticking


def _is_full_again(log: list[Step], count: int = 3, num_steps: int = 5) -> bool:
    """True after some steps with all members in a view after a loss.

    The first view has number 1. No step need be made in that after the loss.
    """
    last = log[-num_steps:]
    return [(len(step.members), step.view > 2) for step in last] == [(count, True)] * num_steps


def _until_lost(training: Training, count: int) -> None:
    """Waits until a member has made a step with fewer members."""
    training.until(lambda log: any(len(step.members) < count for step in log))


def _check_logs(trainings: list[Training]) -> None:
    """All have the same log, and each sum is that of its participants."""
    for training in trainings:
        training.join()
        assert training.log == trainings[0].log
    for step in trainings[0].log:
        assert step.total == sum(1 << member for member in step.members)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_process_that_is_started_again_continues_with_the_others(make_cluster, lost) -> None:
    cluster = make_cluster(3)
    trainings = [Training(group, _is_full_again) for group in cluster.started(3)]
    trainings[lost].group.close()
    others = [one for index, one in enumerate(trainings) if index != lost]
    _until_lost(others[0], 3)
    others.append(Training(cluster.member(lost), _is_full_again))
    _check_logs(others)
    log = members_of(others[0].log)
    assert log[-1] == (0, 1, 2)
    assert tuple(sorted({0, 1, 2} - {lost})) in log


def test_one_that_is_started_before_the_others_notice_is_a_new_process(make_cluster) -> None:
    """It has the address and the id of the lost one, whose place it must not take unasked."""
    cluster = make_cluster(3)
    trainings = [Training(group, _is_full_again) for group in cluster.started(3)]
    lost = trainings.pop(1)
    lost.group._gate.close()  # its connections are whole, and its port is free
    again = cluster.member(1)
    assert again.is_candidate
    lost.group.close()
    trainings.append(Training(again, _is_full_again))
    _check_logs(trainings)


def test_two_processes_join_one_after_the_other_or_together(make_cluster) -> None:
    cluster = make_cluster(4)
    is_over = lambda log: _is_full_again(log, 4)  # noqa: E731
    trainings = [Training(group, is_over) for group in cluster.started(4)]
    for lost in (0, 2):
        trainings[lost].group.close()
    left = [trainings[1], trainings[3]]
    left[0].until(lambda log: (1, 3) in members_of(log))
    left += [Training(cluster.member(lost), is_over) for lost in (0, 2)]
    _check_logs(left)


def test_one_that_waits_joins_in_the_change_that_a_loss_makes(make_cluster) -> None:
    cluster = make_cluster(4, prepares=True)  # the members are not, so it joins at no other time

    def is_over(log: list[Step]) -> bool:
        return (0, 2, 3) in members_of(log) and len(log) > 30

    trainings = [Training(group, is_over, may_retry=True) for group in cluster.started(4)]
    trainings.pop(3).group.close()
    _until_lost(trainings[0], 4)
    trainings.append(Training(cluster.member(3), is_over))
    inbox = trainings[0].group._inbox
    trainings[0].until(lambda log: inbox.has_candidate(PLACE, (0, 1, 2)))
    lost = trainings.pop(1)
    lost.group.close()
    _check_logs(trainings)
    log = members_of(trainings[0].log)
    assert set(log) <= {(0, 1, 2, 3), (0, 1, 2), (0, 2, 3), (0, 2)}
    assert log.count((0, 2)) <= 2


def test_one_that_dies_while_it_joins_is_left_out(make_cluster) -> None:
    cluster = make_cluster(3)
    has_died = threading.Event()
    # The others wait in the same round, so that they see it before the same step.
    trainings = [Training(group, lambda log: has_died.is_set()) for group in cluster.started(3)]
    trainings.pop(1).group.close()
    _until_lost(trainings[0], 3)
    again = cluster.member(1)

    def die() -> None:
        has_died.set()
        again.close()
        raise PeerLostError("this process ends")

    dying = Training(again, lambda log: False, in_handover=die)
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        dying.join()
    _check_logs(trainings)
    assert trainings[0].group.view.members == (0, 2)


def test_the_state_comes_from_another_member_if_its_sender_is_lost(make_cluster) -> None:
    cluster = make_cluster(4)
    groups = cluster.started(4)

    def is_over(log: list[Step]) -> bool:
        return members_of(log)[-5:] == [(1, 2, 3)] * 5

    def die() -> None:
        groups[0].close()
        raise PeerLostError("this process ends")

    trainings = [
        Training(group, is_over, in_handover=die if index == 0 else None)
        for index, group in enumerate(groups)
    ]
    trainings.pop(3).group.close()
    _until_lost(trainings[0], 4)
    trainings.append(Training(cluster.member(3), is_over))
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        trainings.pop(0).join()
    _check_logs(trainings)


def test_a_candidate_finds_the_next_member_if_the_first_is_lost(make_cluster) -> None:
    cluster = make_cluster(3, prepares=True)

    def is_over(log: list[Step]) -> bool:
        return len(log) > 20 and members_of(log)[-1] == (1, 2)

    trainings = [Training(group, is_over) for group in cluster.started(3)]
    trainings.pop(2).group.close()
    _until_lost(trainings[0], 3)
    trainings.append(Training(cluster.member(2), is_over))
    inbox = trainings[0].group._inbox
    trainings[0].until(lambda log: inbox.has_candidate(PLACE, (0, 1)))
    trainings[1].group.admissions.prepared_for = 2
    trainings.pop(0).group.close()
    _check_logs(trainings)


def test_members_wait_until_all_are_prepared_for_one_more(make_cluster) -> None:
    cluster = make_cluster(2, prepares=True)
    trainings = [Training(group, _two_again) for group in cluster.started(2)]
    trainings.pop(1).group.close()
    _until_lost(trainings[0], 2)
    trainings.append(Training(cluster.member(1), _two_again))
    group = trainings[0].group
    trainings[0].until(lambda log: group.admissions.wanted_size is not None)
    num_steps = len(trainings[0].log)
    trainings[0].until(lambda log: len(log) >= num_steps + 5)
    assert group.view.members == (0,)
    group.admissions.prepared_for = 2
    _check_logs(trainings)


def _two_again(log: list[Step]) -> bool:
    return _is_full_again(log, 2)


# Pauses while members change, against times computed by hand.

_TASKS = {0: "worker 0", 1: "worker 1", 2: "worker 2"}
_ALL = View(0, (0, 1, 2), incarnations=(5, 6, 7))
_WITHOUT_1 = View(1, (0, 2), incarnations=(5, 7))


class _Events:
    def __init__(self) -> None:
        self.found: list[MembersEvent] = []

    def members(self, event: MembersEvent) -> None:
        self.found.append(event)


def _pauses() -> tuple[TrainingPauses, list[MembersEvent]]:
    events: Any = _Events()
    return TrainingPauses(_TASKS, lambda: events), events.found


def _train(pauses: TrainingPauses, *ends_s: float, number: int = 0) -> None:
    for end_s in ends_s:
        pauses.end_step(number, end_s)


def _changes(event: MembersEvent) -> tuple[list[str], list[str], int]:
    return event.lost, event.joined, event.num_members


def test_pause_is_the_time_between_two_steps_less_a_step() -> None:
    """Steps end at 1, 2, 3.5 and 4.5: the median is 1. The next one ends 3 seconds later."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3.5, 4.5)
    pauses.note_change(_ALL, _WITHOUT_1, 0.25)
    assert found == []
    _train(pauses, 7.5, 8.5, number=1)
    (event,) = found
    assert _changes(event) == (["worker 1"], [], 2)
    assert (event.view, event.num_expected, event.monotonic_s) == (1, 3, 7.5)
    assert (event.change_s, event.pause_s, event.step_s) == (0.25, 2.0, 1.0)


def test_step_that_counts_although_a_member_was_lost_ends_before_the_pause() -> None:
    """It has the number of the view before, and ends at 4. The change takes until 6."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3)
    pauses.note_change(_ALL, _WITHOUT_1, 2.0)
    _train(pauses, 4)
    assert found == []
    _train(pauses, 7, number=1)
    assert [event.pause_s for event in found] == [2.0]


def test_changes_without_a_step_in_between_are_one_event() -> None:
    """Worker 1 is lost, starts again, is lost again, and the third one stays."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3)
    again = View(2, (0, 1, 2), incarnations=(5, 8, 7))
    last = View(4, (0, 1, 2), incarnations=(5, 9, 7))
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    pauses.note_change(_WITHOUT_1, again, 0.25)
    pauses.note_change(again, last, 0.25)
    _train(pauses, 9, number=4)
    (event,) = found
    assert _changes(event) == (["worker 1"] * 2, ["worker 1"] * 2, 3)
    assert (event.change_s, event.pause_s) == (1.0, 5.0)


def test_time_of_a_pause_is_no_time_of_a_step() -> None:
    pauses, found = _pauses()
    _train(pauses, 1, 2)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 100, 101, number=1)
    pauses.note_change(_WITHOUT_1, View(2, (0, 1, 2), incarnations=(5, 8, 7)), 0.5)
    _train(pauses, 104, number=2)
    assert [event.pause_s for event in found] == [97.0, 2.0]
    assert [event.step_s for event in found] == [1.0, 1.0]
    assert _changes(found[1]) == ([], ["worker 1"], 3)


def test_pause_without_steps_before_is_unknown() -> None:
    pauses, found = _pauses()
    pauses.begin(_ALL)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 7, number=1)
    assert [_changes(event) for event in found] == [([], [], 3), (["worker 1"], [], 2)]
    assert [(event.pause_s, event.step_s) for event in found] == [(None, None)] * 2


def test_loss_before_the_first_step_of_a_process_that_joins_is_recorded_once() -> None:
    pauses, found = _pauses()
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    pauses.begin(_WITHOUT_1)
    assert found == []
    _train(pauses, 7, number=1)
    assert [_changes(event) for event in found] == [(["worker 1"], [], 2)]


def test_without_a_folder_of_the_run_nothing_is_recorded() -> None:
    pauses = TrainingPauses(_TASKS, lambda: None)
    pauses.begin(_ALL)
    _train(pauses, 1, 2)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 3, number=1)


def test_members_of_a_group_record_a_loss_and_a_join(make_cluster, monkeypatch) -> None:
    """Each member that stays records both; the one that joins records that it trains."""
    monkeypatch.setattr(rounds, "time", ticking())
    cluster = make_cluster(3)
    groups = cluster.started(3)
    found: dict[int, list[MembersEvent]] = {}

    def record(group: Any) -> None:
        events: Any = _Events()
        found[group.member] = events.found
        group._pauses._find_events = lambda: events

    for group in groups:
        record(group)
    log_sizes = lambda log: [len(step.members) for step in log]  # noqa: E731

    def is_over(log: list[Any]) -> bool:
        return 2 in log_sizes(log) and log_sizes(log)[-3:] == [3] * 3

    trainings = [Training(group, is_over) for group in groups]
    trainings[0].until(lambda log: len(log) > 3)
    trainings.pop(1).group.close()
    trainings[0].until(lambda log: 2 in log_sizes(log))
    again = cluster.member(1)
    record(again)
    trainings.append(Training(again, is_over))
    for training in trainings:
        training.join()
    for member in (0, 2):
        lost, joined = found[member]
        assert _changes(lost) == (["worker 1"], [], 2)
        assert _changes(joined) == ([], ["worker 1"], 3)
        assert lost.monotonic_s < joined.monotonic_s
        for event in (lost, joined):
            assert event.pause_s is not None
            assert event.change_s > 0
    assert [_changes(event) for event in found[1]] == [([], [], 3)]


# The decision that ends one view and begins the next.


def test_a_round_that_not_all_completed_does_not_count() -> None:
    reports = [Report(0, 0, 7, is_complete=True), Report(2, 0, 7, is_complete=False)]
    assert next_view(reports) == View(1, (0, 2), 7, (0, 0))


def test_a_round_that_all_completed_counts() -> None:
    reports = [Report(2, 3, 7, is_complete=True), Report(1, 3, 7, is_complete=True)]
    assert next_view(reports) == View(4, (1, 2), 8, (0, 0))


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_round_that_one_has_committed_counts_for_all(is_complete) -> None:
    reports = [Report(0, 0, 8, is_complete=is_complete), Report(1, 0, 7, is_complete=True)]
    assert next_view(reports).num_rounds == 8


def test_a_member_without_the_values_of_a_committed_round_is_refused() -> None:
    with pytest.raises(RuntimeError, match="exclude each other"):
        next_view([Report(0, 0, 8, is_complete=False), Report(1, 0, 7, is_complete=False)])


def test_members_of_two_views_continue_after_the_later_one() -> None:
    reports = [Report(0, 4, 7, is_complete=False), Report(1, 5, 7, is_complete=False)]
    assert next_view(reports).number == 6


def test_all_states_that_a_loss_can_leave_have_a_decision_that_each_member_can_follow() -> None:
    """Members are before, in, or past the barrier; past it only if all have reached it."""
    for stages in itertools.product(("before", "in", "past"), repeat=3):
        if "past" in stages and "before" in stages:
            continue
        reports = [
            Report(member, 0, 5 + (stage == "past"), is_complete=stage == "in")
            for member, stage in enumerate(stages)
        ]
        decided = next_view(reports).num_rounds
        for report in reports:
            assert decided == report.num_rounds or (
                decided == report.num_rounds + 1 and report.is_complete
            )
        assert decided == (5 if "before" in stages else 6)


def test_one_without_the_state_stays_new_until_its_first_round_counts() -> None:
    reports = [Report(0, 3, 7, is_complete=True), Report(1, 3, 7, is_complete=True, is_new=True)]
    assert next_view(reports).newcomers == ()
    reports[0] = Report(0, 3, 7, is_complete=False)
    assert next_view(reports).newcomers == (1,)


def test_no_view_has_only_members_without_the_state() -> None:
    with pytest.raises(UnavailableError, match="All members that had the values"):
        next_view([Report(1, 3, 7, is_complete=True, is_new=True)])


def test_incarnations_and_newcomers_are_in_the_order_of_members() -> None:
    view = next_view([Report(3, 0, 2, False, 33), Report(1, 0, 2, False, 11)])
    assert with_newcomers(view, {2: 22}) == View(1, (1, 2, 3), 2, (11, 22, 33), (2,))


def test_a_view_arrives_as_it_was_sent() -> None:
    view = View(4, (0, 2), 9, (11, 22), (2,), is_change_due=True)
    assert View.of_message(json.loads(json.dumps(dataclasses.asdict(view)))) == view


# Messages about changes of the members, and errors.

_LABELS = ("chief", "worker 0", "worker 1", "worker 2")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({0: 10, 1: 11, 2: 12}, {0: 10, 2: 12}, "Lost worker 0: 2 of 4 continue"),
        ({0: 10, 1: 11, 2: 12}, {2: 12}, "Lost chief, worker 0: 1 of 4 continue"),
        ({0: 10}, {0: 10, 1: 11, 3: 13}, "worker 0, worker 2 joined: 3 of 4 continue"),
        ({0: 10, 1: 11}, {0: 10, 2: 12}, "Lost worker 0; worker 1 joined: 2 of 4 continue"),
        # Another process with the id of the one before.
        ({0: 10, 1: 11}, {0: 10, 1: 99}, "Lost worker 0; worker 0 joined: 2 of 4 continue"),
        ({0: 10, 1: 11}, {0: 10, 1: 11}, "Lost a connection, and no member: 2 of 4 continue"),
    ],
    ids=str,
)
def test_a_change_names_those_that_were_lost_and_that_joined(before, after, text) -> None:
    views = [
        View(number, tuple(members), 0, tuple(members.values()))
        for number, members in enumerate((before, after))
    ]
    assert group_messages.change_text(*views, _LABELS) == text


def _raise(error: Exception) -> None:
    raise error


def test_a_step_before_joining_has_an_error_that_says_how_to_join() -> None:
    with pytest.raises(RuntimeError, match="'save' was called in a process that has not joined"):
        _raise(group_messages.not_joined("save"))


def test_an_agreement_on_a_step_has_an_error_with_another_way() -> None:
    with pytest.raises(NotImplementedError, match="'exit 1' was to be agreed on by the processes"):
        _raise(group_messages.agreement_refused("exit 1"))


def test_a_wait_that_was_too_long_names_the_others_and_the_setting() -> None:
    error = group_messages.waited_too_long("chief", ["worker 0", "worker 1"], 31.4, 30.0, "SOME_S")
    with pytest.raises(
        DeadlineExceededError,
        match="chief waited 31 s for values of other members; all of worker 0, worker 1 still run",
    ):
        _raise(error)
    assert "progress within 30 s (SOME_S)" in str(error)


def test_a_step_that_differs_has_an_error_with_both_sides() -> None:
    cause = ConnectionError("worker 1 called 'step b1'")
    with pytest.raises(RuntimeError, match="chief called 'step a0', but worker 1 called 'step b1'"):
        _raise(group_messages.diverged("chief", "'step a0'", cause))
