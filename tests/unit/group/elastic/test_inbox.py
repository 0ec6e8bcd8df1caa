"""Rounds of an elastic group whose members are lost at any moment."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.elastic import inbox as reaching
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.inbox import (
    DATA,
    PROBE,
    PURPOSE,
    READY,
    REPORT,
    EndedError,
    Inbox,
    Peers,
    Stage,
    receive_message,
)
from stratagem.group.elastic.peer_connections import DivergedError, PeerConnections, PeerLostError
from stratagem.group.elastic.views import View
from stratagem.launch.plan.ports import free_ports
from tests.unit.group.elastic.members import LIMITS
from tests.unit.group.process_group.members import listed, together


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


def test_a_process_that_has_not_joined_begins_no_round(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.started(2)[1].close()
    with pytest.raises(RuntimeError, match="'step' was called in a process that has not joined"):
        cluster.member(1).begin_round("step")


def test_operations_after_a_loss_do_nothing(members) -> None:
    members[1].close()
    members[0].begin_round("step")
    assert not members[0].operate(PeerConnections.barrier)
    calls: list[PeerConnections] = []
    assert not members[0].operate(calls.append)
    assert calls == []


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


class _Training:
    """Members that sum in rounds until two are left, and keep what they have committed."""

    def __init__(self, groups: list[ElasticGroup]) -> None:
        self.groups = groups
        self.logs: list[list[float]] = [[] for _ in groups]
        self._threads = [
            threading.Thread(target=self._train, args=(index,), daemon=True)
            for index in range(len(groups))
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, index: int) -> None:
        group = self.groups[index]
        own = np.full(50_000, float(index), np.float64)
        total = np.empty_like(own)
        num_last = 0
        while num_last < 20:
            try:
                group.begin_round("step")
                group.operate(lambda peers: peers.reduce(own, total, np.add))
                is_committed = group.commit()
            except (RuntimeError, UnavailableError):  # closed, or refused by the others
                return
            if is_committed:
                self.logs[index].append(float(total[0]))
                # Not the view: it may have changed since, on this member only.
                num_last += len(group.participants) == 2 and self.logs[index][-1] == total[-1]

    def join(self, index: int) -> None:
        self._threads[index].join(120)
        assert not self._threads[index].is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_logs_of_rounds_agree_whenever_members_are_lost(make_cluster, seed) -> None:
    """Members are closed at random moments; the others have the same log."""
    groups = make_cluster(5).started(5)
    chance = random.Random(seed)
    victims = chance.sample(range(5), 3)
    training = _Training(groups)
    for victim in victims:
        time.sleep(chance.uniform(0.0, 0.3))
        groups[victim].close()
    survivors = [index for index in range(5) if index not in victims]
    for index in survivors:
        training.join(index)
    first, second = (training.logs[index] for index in survivors)
    assert first == second
    assert first[-1] == sum(survivors)
    for victim in victims:  # all have what it has committed
        log = training.logs[victim]
        assert first[: len(log)] == log


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


def test_a_member_that_makes_no_progress_is_an_error(make_cluster) -> None:
    limits = LIMITS.__class__(join_s=120, peer_s=120, stuck_s=0.01, barrier_s=120)
    groups = make_cluster(2, limits=limits).started(2)
    groups[0].begin_round("step")
    with pytest.raises(DeadlineExceededError, match="STRATAGEM_STUCK_TIMEOUT_S"):
        groups[0].operate(PeerConnections.barrier)


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
    with pytest.raises(RuntimeError, match="has not joined"):
        candidate.begin_round("step")


# Connections that wait in an inbox, each with its other side in this process.

_LIMIT_S = 120.0
Admit = Callable[[str], socket.socket]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """The inbox of a process that trains."""
    made = Inbox(70)
    made.tell(stage=Stage.TRAINS)
    yield made
    made.close()


@pytest.fixture
def admit(inbox) -> Iterator[Admit]:
    """Admits a connection with a claim; returns the side of the process that has opened it."""
    sides: list[socket.socket] = []

    def open_one(claim: str) -> socket.socket:
        theirs, ours = socket.socketpair()
        theirs.settimeout(_LIMIT_S)
        sides.append(theirs)
        inbox.admit(ours, claim)
        return theirs

    yield open_one
    for side in sides:
        side.close()


def _is_closed(side: socket.socket) -> bool:
    """True if the inbox has closed a connection, and False if nothing has arrived on it."""
    side.settimeout(0)
    try:
        return side.recv(1) == b""
    except BlockingIOError:
        return False


def _is_refused(side: socket.socket) -> bool:
    expected = "The other members continued without this process"
    return receive_message(side, _LIMIT_S)["error"].startswith(expected)


def test_a_connection_for_a_view_is_taken_once(inbox, admit) -> None:
    theirs = admit(f"{DATA} 3 1")
    assert inbox.take_data(2, 1) is None
    assert inbox.take_data(3, 2) is None
    ours = inbox.take_data(3, 1)
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    assert inbox.take_data(3, 1) is None
    ours.close()


@pytest.mark.parametrize("claim", [f"{DATA} 3 1", f"{REPORT} 1 7", f"{READY} 1 7 loop"])
def test_another_attempt_of_a_process_replaces_the_one_before(inbox, admit, claim) -> None:
    first, second = admit(claim), admit(claim)
    assert _is_closed(first)
    assert not _is_closed(second)


def test_a_new_view_ends_the_connections_of_those_before(inbox, admit) -> None:
    earlier, present, later = (admit(f"{DATA} {view} 1") for view in (2, 3, 4))
    inbox.begin_view(3, {0: 70, 1: 7})
    assert [_is_closed(one) for one in (earlier, present, later)] == [True, False, False]


def test_before_the_first_view_any_process_reports(inbox, admit) -> None:
    admit(f"{REPORT} 1 7")
    assert inbox.has_report()
    ours = inbox.take_report(1)
    ours.close()
    assert inbox.take_report(1) is None
    assert not inbox.has_report()


def test_reports_of_processes_that_the_view_does_not_have_are_refused(inbox, admit) -> None:
    waiting = {claim: admit(f"{REPORT} {claim}") for claim in ("1 7", "2 8", "3 9")}
    inbox.begin_view(1, {0: 70, 1: 7, 2: 88})
    assert not _is_closed(waiting["1 7"])
    assert _is_refused(waiting["2 8"])  # the process before the member
    assert _is_refused(waiting["3 9"])
    assert _is_refused(admit(f"{REPORT} 1 6"))
    assert not _is_closed(admit(f"{REPORT} 2 88"))


@pytest.mark.parametrize("stage", [Stage.STARTS, Stage.WAITS])
def test_nobody_waits_to_join_one_that_does_not_train(inbox, admit, stage) -> None:
    inbox.tell(stage=stage)
    assert _is_closed(admit(f"{READY} 1 7 loop"))
    assert not inbox.has_candidate("loop", ())


def test_candidates_are_those_at_the_place_that_are_no_members(inbox, admit) -> None:
    admit(f"{READY} 1 7 fit:1")
    assert inbox.has_candidate("fit:1", (0, 2))
    assert not inbox.has_candidate("fit:2", (0, 2))
    assert not inbox.has_candidate(None, (0, 2))
    assert not inbox.has_candidate("fit:1", (0, 1))  # the member of this id has not ended yet


def test_candidates_are_taken_once_in_their_order(inbox, admit) -> None:
    for member in (5, 3, 4, 2):
        admit(f"{READY} {member} {member + 100} {'loop' if member != 2 else 'fit:1'}")
    taken = inbox.take_candidates("loop", (0, 4))
    assert [(member, one.incarnation) for member, one in taken.items()] == [(3, 103), (5, 105)]
    left = inbox.take_candidates("loop", (0,))
    assert list(left) == [4]
    assert inbox.has_candidate("fit:1", (0,))
    for one in (*taken.values(), *left.values()):
        one.connection.close()


def test_candidates_that_have_ended_are_not_taken(inbox, admit) -> None:
    admit(f"{READY} 1 7 loop").close()
    assert inbox.take_candidates("loop", (0,)) == {}
    assert not inbox.has_candidate("loop", (0,))


def test_probes_get_what_the_process_says_of_itself(inbox, admit) -> None:
    inbox.tell(place="fit:1", members=[0, 2])
    inbox.tell(place=None)
    answer = receive_message(admit(PROBE), _LIMIT_S)
    assert answer == {
        "incarnation": 70,
        "stage": "trains",
        "place": None,
        "num_calls": 0,
        "members": [0, 2],
    }


def test_a_probe_of_one_that_has_gone_is_no_error(inbox) -> None:
    theirs, ours = socket.socketpair()
    theirs.close()
    inbox.admit(ours, PROBE)
    assert ours.fileno() == -1


def test_one_that_waits_for_a_change_hears_of_each_connection(inbox, admit) -> None:
    has_begun, heard = threading.Event(), threading.Event()

    def wait() -> None:
        with inbox.changed:
            has_begun.set()
            if inbox.changed.wait_for(inbox.has_report, _LIMIT_S):
                heard.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert has_begun.wait(_LIMIT_S)
    admit(f"{REPORT} 1 7")
    thread.join()
    assert heard.is_set()


def test_a_closed_inbox_ends_all_connections_and_takes_no_more(inbox, admit) -> None:
    inbox.check_open()
    claims = [f"{DATA} 3 1", f"{REPORT} 1 7", f"{READY} 2 8 loop"]
    before = [admit(claim) for claim in claims]
    inbox.close()
    after = [admit(claim) for claim in [*claims, PROBE]]
    assert all(map(_is_closed, [*before, *after]))
    assert inbox.take_data(3, 1) is None
    assert inbox.take_report(1) is None
    assert not inbox.has_candidate("loop", ())
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        inbox.check_open()


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


# Members that have ended, and those that cannot be reached.

_PEER_S = 0.3


def _peers(port: int) -> Peers:
    addresses = [("127.0.0.1", 1), ("127.0.0.1", port)]
    return Peers(0, ["worker 0", "worker 1"], addresses, Credentials(), peer_s=_PEER_S)


def test_a_port_that_refuses_belongs_to_one_that_has_ended() -> None:
    peers = _peers(free_ports(1)[0])
    assert peers.is_lost(1)
    assert not peers.is_silent(1)
    with pytest.raises(EndedError):
        peers.dial_report(1)


def test_a_host_that_cannot_be_reached_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No route to it: a broken network must not look like the end of a process."""

    async def unreachable(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(reaching, "reach", unreachable)
    peers = _peers(1)
    assert not peers.is_lost(1)
    peers._silent_since[1] -= 2 * _PEER_S
    assert peers.is_lost(1)
    assert peers.is_silent(1)


def test_one_that_is_stopped_may_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = _peers(listener.getsockname()[1])
        assert not peers.is_lost(1)
        assert peers.is_silent(1)


@pytest.mark.parametrize("has_started", [False, True])
def test_another_program_at_the_port(has_started) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = _peers(listener.getsockname()[1])
        peers.have_started = has_started

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(
            EndedError if has_started else ValueError, match="Another program has taken port"
        ):
            peers.dial_report(1)
        thread.join()


@pytest.mark.parametrize(("expected", "is_lost"), [(7, False), (8, True)])
def test_another_process_at_the_address_of_a_member_proves_that_it_has_ended(
    expected, is_lost
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    peers = _peers(listener.getsockname()[1])
    peers.expected = {1: expected}
    with Gate([listener], Credentials(), Inbox(7).admit, purpose=PURPOSE):
        assert peers.is_lost(1) == is_lost
        assert not peers.is_silent(1)


# Messages between members that are broken.


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\xff\xff\xff\xff", "which is too large"),
        (b"\0\0\0\x02{]", "received no message"),
        (b"\0\0\0\x02[]", "holds no JSON object"),
        (b"\0\0", "closed by the other side"),
    ],
)
def test_a_broken_message_is_an_error_of_the_connection(sent, words) -> None:
    theirs, ours = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        with pytest.raises(ConnectionError, match=words):
            receive_message(ours, 1)
