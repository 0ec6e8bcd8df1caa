"""Rounds and exchanges of an elastic group whose members are lost at any moment."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.authentication.secret import Credentials
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import DivergedError, PeerConnections, PeerLostError
from stratagem.group.elastic.views import View
from tests.unit.group.elastic.members import LIMITS, Training, members_of
from tests.unit.group.process_group.members import listed, together
from tests.unit.launch.waiting import until


def _round(group: ElasticGroup) -> bool:
    group.begin_round("round")
    group.operate(PeerConnections.barrier)
    return group.commit()


def test_participants_are_those_of_the_last_committed_round(members) -> None:
    assert members[0].participants == ()
    assert together(3, lambda index: _round(members[index])) == [True] * 3
    members[1].close()
    assert together(2, lambda index: _round(members[2 * index])) == [False] * 2
    assert members[0].participants == (0, 1, 2)
    assert together(2, lambda index: _round(members[2 * index])) == [True] * 2
    assert members[0].participants == members[2].participants == (0, 2)


def test_listeners_hear_of_a_change_once_and_between_rounds(members) -> None:
    heard: list[View] = []
    members[0].on_change(heard.append)
    members[0].tell()
    assert heard == []
    members[1].close()
    together(2, lambda index: _round(members[2 * index]))
    assert members[0].num_processes == 3  # for its program, until it is ready for the change
    members[0].tell()
    members[0].tell()
    assert [view.members for view in heard] == [(0, 2)]
    assert members[0].num_processes == 2


def test_rounds_count_for_all_or_for_none(members) -> None:
    """A member is lost within a sum: the others combine their own values instead."""
    own = [np.full(100_000, 1 << index, np.float32) for index in range(3)]
    totals = [np.empty_like(one) for one in own]

    def act(index: int) -> bool:
        group = members[index]
        group.begin_round("sum")
        if index == 1:
            group.close()
            return False
        group.operate(lambda peers: peers.reduce(own[index], totals[index], np.add))
        return group.commit()

    assert together(3, act) == [False] * 3

    def again(index: int) -> float:
        index *= 2
        members[index].run_round(
            "sum", lambda peers: peers.reduce(own[index], totals[index], np.add)
        )
        return float(totals[index][0])

    assert together(2, again) == [5.0, 5.0]


@pytest.mark.parametrize("seed", range(3))
def test_logs_of_rounds_agree_whenever_members_are_lost(make_cluster, seed) -> None:
    """Members are closed at random moments; the others have the same log."""
    chance = random.Random(seed)
    victims = chance.sample(range(5), 3)
    left = tuple(sorted({*range(5)} - {*victims}))
    trainings = [
        Training(group, lambda log: members_of(log[-20:]) == [left] * 20)
        for group in make_cluster(5).started(5)
    ]
    for victim in victims:
        time.sleep(chance.uniform(0.0, 0.3))
        trainings[victim].group.close()
    for index in left:
        trainings[index].join()
    log = trainings[left[0]].log
    assert trainings[left[1]].log == log
    assert all(step.total == sum(1 << member for member in step.members) for step in log)
    for victim in victims:  # all have what it has committed
        with pytest.raises((RuntimeError, UnavailableError)):
            trainings[victim].join()
        assert log[: len(trainings[victim].log)] == trainings[victim].log


def test_one_that_has_left_cannot_go_on(members) -> None:
    members[0].close()
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        members[0].exchange("place", 1)


def test_a_report_of_a_broken_view_breaks_the_round_of_one_that_waits(members) -> None:
    """Its own connections are whole, and tell it nothing."""
    with members[1]._peers.dial_report(0):
        with members[0]._inbox.changed:
            members[0]._inbox.changed.wait_for(members[0]._inbox.has_report, 120)
        with pytest.raises(PeerLostError, match="another member reports a broken view"):
            members[0]._check_view(0.0)


def test_a_member_that_makes_no_progress_is_an_error(make_cluster, capfd) -> None:
    """And every member prints its stacks once, also the one that does not wait."""
    limits = LIMITS.__class__(join_s=120, peer_s=120, stuck_s=0.01, barrier_s=120)
    groups = make_cluster(3, limits=limits).started(3)

    def wait(index: int) -> None:
        groups[index].begin_round("step")
        with pytest.raises(DeadlineExceededError, match="STRATAGEM_STUCK_TIMEOUT_S"):
            groups[index].operate(PeerConnections.barrier)

    together(2, wait)
    printed = ""

    def have_all() -> bool:
        nonlocal printed
        printed += capfd.readouterr().err
        return all(f"{one}: stacks at the time limit.\n" in printed for one in labels)

    labels = groups[0].identity.labels
    until(have_all)
    assert printed.count("stacks at the time limit") == 3


def test_a_rehearsal_ends_its_rounds_at_once_and_counts_none(make_cluster) -> None:
    cluster = make_cluster(3)
    cluster.started(3)[2].close()
    with pytest.raises(AssertionError), cluster.groups[0].rehearsal():
        pass
    candidate = cluster.member(2)
    called = []
    with candidate.rehearsal():
        candidate.begin_round("step")
        assert not candidate.operate(called.append)
        assert not candidate.commit()
    assert not called
    with pytest.raises(RuntimeError, match="'step' was called in a process that has not joined"):
        candidate.begin_round("step")


# Exchanges of an elastic group whose members are lost.


def test_all_get_the_values_of_all_in_order(members) -> None:
    def exchange(index: int) -> list:
        return [members[index].exchange("place", (index, np.full(2, index))) for _ in range(20)][-1]

    for received in together(3, exchange):
        assert [index for index, _ in received] == [0, 1, 2]
        assert [array.tolist() for _, array in received] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_go_on(members, lost) -> None:
    left = [index for index in range(3) if index != lost]
    members[lost].close()
    for _ in range(2):
        received = together(2, lambda i: members[left[i]].exchange("place", left[i]))
        assert received == [left, left]
    for rank, index in enumerate(left):
        assert members[index].view.members == tuple(left)
        assert members[index].process_id == rank
        assert members[index].num_processes == len(members[index].identity.labels) == 2


def test_a_member_that_computes_is_waited_for(members) -> None:
    members[0].close()
    began = threading.Event()

    def exchange(index: int) -> list:
        if index == 1:
            began.wait(120)
            time.sleep(0.5)
        else:
            began.set()
        return members[index + 1].exchange("place", index)

    assert together(2, exchange) == [[0, 1], [0, 1]]


def test_one_that_others_have_given_up_gets_the_reason(members) -> None:
    """Its port refuses connections, though it runs: the others take it for ended."""
    members[2]._gate.close()
    members[2]._connections.close()
    assert together(2, lambda i: members[i].exchange("place", i)) == [[0, 1]] * 2
    with pytest.raises(UnavailableError, match="The other members continued without this"):
        members[2].exchange("place", 2)
    assert together(2, lambda i: members[i].exchange("place", i)) == [[0, 1]] * 2


def test_an_exchange_has_the_limit_that_it_is_given(members) -> None:
    with pytest.raises(
        DeadlineExceededError,
        match=r"waited \d+ s for values of (?s:.)*progress within 0\.5 s \(the limit of a test\)",
    ):
        members[0].exchange("place", 1, timeout_s=0.5, setting="the limit of a test")


def test_different_calls_are_an_error(members) -> None:
    names = ["save", "save", "evaluate"]
    errors = together(3, lambda index: members[index].exchange(names[index], None))
    assert any(isinstance(error, DivergedError) for error in errors)


def test_a_member_that_never_starts_is_named() -> None:
    limits = LIMITS.__class__(join_s=0.5, peer_s=1, stuck_s=1, barrier_s=1)
    ports = free_ports(3)
    errors = together(2, lambda index: ElasticGroup(listed(index, ports), limits, Credentials()))
    for error in errors:
        assert isinstance(error, DeadlineExceededError)
    assert "worker 2 (host2:1)" in str(errors[0])


def test_a_candidate_has_only_its_own_values_and_runs_no_rounds(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.started(2)[0].close()
    candidate = cluster.member(0)
    assert candidate.is_candidate
    assert candidate.process_id == 1  # not 0, whose values the others would take
    assert candidate.exchange("the initial values of 3 variables", [1]) == [[1], [1]]
    with pytest.raises(RuntimeError, match="has not joined the others yet"):
        candidate.exchange("model.save", None)


def test_a_look_ends_the_wait_of_a_candidate(make_cluster) -> None:
    cluster = make_cluster(3)
    groups = cluster.started(3)
    groups.pop().close()
    candidate = cluster.member(2)
    for group in groups:
        group.admissions.begin_call()
    assert not candidate.join("fit:1", lambda running: running.num_calls == 1)
    assert candidate.is_candidate
