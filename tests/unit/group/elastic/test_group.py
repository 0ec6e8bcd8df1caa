"""Exchanges of an elastic group whose members are lost."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.authentication.secret import Credentials
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import DivergedError
from stratagem.launch.plan.ports import free_ports
from tests.unit.group.elastic.members import LIMITS
from tests.unit.group.process_group.members import listed, together


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


def test_one_goes_on_alone(members) -> None:
    members[0].close()
    members[1].close()
    assert members[2].exchange("place", 5) == [5]
    assert members[2].process_id == 0


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
    with pytest.raises(DeadlineExceededError, match="for values of other members; all of"):
        members[0].exchange("place", 1, timeout_s=0.5, setting="the limit of this test")


def test_agreements_on_a_step_are_refused(members) -> None:
    with pytest.raises(NotImplementedError, match="was to be agreed on by the processes"):
        members[0].listen("preemption exit 1", print)


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
    cluster = make_cluster(3, num_spares=1)
    cluster.started(2)
    spare = cluster.member(2)
    assert spare.is_candidate
    assert spare.process_id == 1
    assert spare.exchange("the initial values of 3 variables", [1]) == [[1], [1]]
    with pytest.raises(RuntimeError, match="has not joined the others yet"):
        spare.exchange("model.save", None)


def test_a_look_ends_the_wait_of_a_candidate(make_cluster) -> None:
    cluster = make_cluster(3, num_spares=1)
    groups = cluster.started(2)
    spare = cluster.member(2)
    for group in groups:
        group.admissions.begin_call()
    assert not spare.join("fit:1", lambda running: running.num_calls == 1)
    assert spare.is_candidate
