"""Processes that join an elastic group that runs: started again, or as spares."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from stratagem.group.elastic.peer_connections import PeerLostError
from stratagem.group.elastic.views import NotAdmittedError
from tests.unit.group.elastic.members import PLACE, Step, Training, members_of
from tests.unit.group.process_group.members import together


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


def test_a_spare_takes_the_place_of_a_lost_member_in_the_same_change(make_cluster) -> None:
    cluster = make_cluster(4, num_spares=1)

    def is_over(log: list[Step]) -> bool:
        return (0, 2, 3) in members_of(log) and len(log) > 30

    trainings = [Training(group, is_over, may_retry=True) for group in cluster.started(3)]
    trainings.append(Training(cluster.member(3), is_over))
    inbox = trainings[0].group._inbox
    trainings[0].until(lambda log: inbox.has_candidate(PLACE, (0, 1, 2)))
    lost = trainings.pop(1)
    lost.group.close()
    _check_logs(trainings)
    log = members_of(trainings[0].log)
    assert set(log) <= {(0, 1, 2), (0, 2, 3), (0, 2)}
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
    cluster = make_cluster(4, num_spares=2)

    def is_over(log: list[Step]) -> bool:
        return len(log) > 20 and members_of(log)[-1] == (1, 3)

    trainings = [Training(group, is_over) for group in cluster.started(2)]
    trainings.append(Training(cluster.member(3), is_over))
    inbox = trainings[0].group._inbox
    trainings[0].until(lambda log: inbox.has_candidate(PLACE, (0, 1)))
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


@pytest.mark.parametrize(("lost", "own"), [(0, 1), (2, 1), (1, 0)])
def test_a_group_with_backups_admits_no_process_and_waits_for_none(make_cluster, lost, own) -> None:
    cluster = make_cluster(3, num_backups=1)
    groups = dict(enumerate(cluster.started(3)))
    groups.pop(lost).close()
    again = dataclasses.replace(cluster, num_backups=own)
    with pytest.raises(NotAdmittedError, match=f"={own}, while the others train with num_backup"):
        again.member(lost)
    left = list(groups)
    assert together(2, lambda place: groups[left[place]].exchange("it", left[place])) == [left] * 2
    for group in groups.values():
        assert group.view.members == tuple(left)
