"""Processes that join an elastic group: they wait, are admitted, and receive the state."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.errors import DataLossError, UnavailableError
from stratagem.group.elastic import joining
from stratagem.group.elastic.joining import (
    Admissions,
    Candidacy,
    RunningGroup,
    SafePoint,
    TrainingState,
    hand_over,
    receive,
)
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.peers import EndedError, Inbox, Stage, send_message
from stratagem.group.elastic.views import View
from tests.unit.group.elastic.members import PLACE, Step, Training, connected_peers, members_of
from tests.unit.group.process_group.members import together

_JOINED = View(5, (1, 2, 3), 7, (11, 12, 13), newcomers=(3,))


def _running(view: int = 4, *members: int, **about: Any) -> dict[str, Any]:
    """Returns the answer of a member to a probe."""
    answer = {"view": view, "members": members or (1, 2), "place": "fit:1", "num_calls": 1}
    return {"stage": Stage.TRAINS, **answer, **about}


class _Peers:
    """Peers of process 3. `answers` has an answer, or an error, for each of the others."""

    own, labels = 3, ("worker 0", "worker 1", "worker 2", "worker 3")
    others = (0, 1, 2)

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers = answers
        self.dialed: list[tuple[int, str]] = []
        self.sides: list[socket.socket] = []
        self.on_dial: Callable[[int, socket.socket], None] = lambda member, side: None
        self.on_probe: Callable[[], None] = lambda: None

    def probe(self, member: int) -> dict[str, Any]:
        self.on_probe()
        answer = self.answers.get(member, EndedError("no process"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def dial_ready(self, member: int, place: str) -> socket.socket:
        self.dialed.append((member, place))
        if isinstance(answer := self.answers[member], Exception):
            raise answer
        theirs, ours = socket.socketpair()
        self.sides += [theirs, ours]
        self.on_dial(member, theirs)
        return ours


@pytest.fixture
def made(monkeypatch) -> Iterator[Callable[..., tuple[_Peers, Candidacy, Inbox]]]:
    """Returns the peers, the candidacy and the inbox of a process that finds members."""
    monkeypatch.setattr(joining, "_LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(joining, "_RETRY_S", 0.001)
    peers: list[_Peers] = []

    def make(answers: dict[int, Any], peer_s: float = 20.0) -> tuple[_Peers, Candidacy, Inbox]:
        one: Any = _Peers(answers)
        peers.append(one)
        inbox = Inbox()
        return one, Candidacy(one, inbox, peer_s=peer_s), inbox

    yield make
    for one in peers:
        for side in one.sides:
            side.close()


def _send_view(member: int, side: socket.socket) -> None:
    send_message(side, dataclasses.asdict(_JOINED), 1)


def _never_over(running: RunningGroup) -> bool:
    return False


@pytest.mark.parametrize(
    ("members", "own", "expected"),
    [
        ((0, 2), 1, (0, 1, 2)),
        ((0, 1, 2), 1, (0, 1, 2)),  # the others have not noticed the loss of the one before
        ((2,), 0, (0, 2)),
    ],
)
def test_the_expected_view_has_this_process(members, own, expected) -> None:
    group = RunningGroup(6, members, None, 0)
    assert group.with_candidate(own) == View(6, expected)


def test_a_look_finds_the_latest_view_of_those_that_train(made) -> None:
    waiting = {"stage": Stage.WAITS}
    _, one, _ = made({0: _running(4, 0, 1, 2), 1: _running(5, 0, 1), 2: waiting})
    assert one.look() == RunningGroup(5, (0, 1), "fit:1", 1)


def test_a_look_waits_for_one_that_does_not_answer(made) -> None:
    peers, one, _ = made({1: TimeoutError()})
    num_probes = 0

    def answer_at_last() -> None:
        nonlocal num_probes
        num_probes += 1
        if num_probes == 10:
            peers.answers[1] = _running()

    peers.on_probe = answer_at_last
    assert one.look().members == (1, 2)


@pytest.mark.parametrize(
    "answer", [EndedError("ended"), {"stage": Stage.WAITS}, TimeoutError()], ids=str
)
def test_a_group_that_has_ended_or_stays_silent_is_an_error(made, answer) -> None:
    peers, one, inbox = made({1: answer}, peer_s=0.01)
    with pytest.raises(UnavailableError, match="All members ended before worker 3 could join them"):
        one.look()
    peers.answers[1] = TimeoutError()
    peers.on_probe = inbox.close
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        one.look()


def test_a_call_that_is_over_ends_the_wait_before_it_dials(made) -> None:
    peers, one, _ = made({1: _running(num_calls=2)})
    assert one.wait("fit:1", lambda running: running.num_calls > 1) is None
    assert peers.dialed == []


def test_the_process_looks_again_when_the_group_has_another_size(made) -> None:
    peers, one, _ = made({1: _running()})
    seen: list[RunningGroup] = []

    def look(running: RunningGroup) -> bool:
        seen.append(running)
        peers.answers[1] = _running(4 + len(seen), *range(1, 3 + len(seen)))
        return len(seen) >= 3

    assert one.wait("fit:1", look) is None
    assert [running.members for running in seen[:3]] == [(1, 2), (1, 2, 3), (1, 2, 3, 4)]
    assert peers.dialed == [(1, "fit:1")]


def test_the_process_looks_once_while_the_group_stays_as_it_is(made) -> None:
    peers, one, _ = made({1: _running()})
    seen: list[RunningGroup] = []
    num_probes = 0

    def send_at_last() -> None:
        nonlocal num_probes
        num_probes += 1
        if num_probes == 20:
            _send_view(1, peers.sides[0])

    peers.on_probe = send_at_last
    assert one.wait("fit:1", lambda running: bool(seen.append(running))) == _JOINED
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["nothing", "dies", "is cut off"])
def test_if_the_leader_is_lost_the_next_member_is_asked(made, how) -> None:
    """One that is cut off has a whole connection, but the others have continued without it."""
    peers, one, _ = made({1: _running(), 2: _running()})

    def answer(member: int, side: socket.socket) -> None:
        if member == 2 or how == "nothing":
            _send_view(member, side)
            return
        peers.answers = {2: _running(5, 2)}
        if how == "dies":
            side.close()
        else:
            peers.answers[1] = TimeoutError()

    peers.on_dial = answer
    assert one.wait("fit:1", _never_over) == _JOINED
    assert peers.dialed == [(1, "fit:1"), (2, "fit:1")][: 1 + (how != "nothing")]


def test_a_leader_that_refuses_is_asked_again(made) -> None:
    """Between its end and the first view without it, the other members still name it."""
    peers, one, _ = made({1: EndedError("ended"), 2: _running()})
    peers.on_dial = _send_view
    looks: list[RunningGroup] = []

    def look(running: RunningGroup) -> bool:
        looks.append(running)
        if len(looks) == 3:
            peers.answers[2] = _running(5, 2)
        return False

    assert one.wait("fit:1", look) == _JOINED
    assert peers.dialed == [(1, "fit:1")] * 3 + [(2, "fit:1")]


def test_a_candidate_of_a_group_that_ends_gets_the_reason(make_cluster) -> None:
    cluster = make_cluster(3)
    groups = cluster.started(3)
    groups.pop().close()
    candidate = cluster.member(2)
    is_waiting = threading.Event()

    def look(running: RunningGroup) -> bool:
        is_waiting.set()
        return False

    def end() -> None:
        is_waiting.wait(120)
        for group in groups:
            group.close()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(UnavailableError, match=r"All members ended before worker 2 \(host2:1\)"):
        candidate.join("loop", look)
    thread.join()
    assert candidate.is_candidate


# What members say in commits, and when they admit others.

_VIEW = View(1, (0, 2), 5, (10, 12))


@pytest.fixture
def fit_inbox():
    """An inbox in which process 1 waits to join `fit`."""
    made, (theirs, ours) = Inbox(), socket.socketpair()
    made.tell(stage=Stage.TRAINS)
    made.admit(ours, "ready 1 11 fit:1")
    yield made
    made.close()
    theirs.close()


def _admissions(fit_inbox: Inbox, own: int = 0, *, prepares: bool = False) -> Admissions:
    made = Admissions(fit_inbox, own, prepares=prepares)
    made.safe = SafePoint("fit:1", 5)
    return made


def test_the_first_member_wants_a_change_that_all_agree_on(fit_inbox) -> None:
    first, second = _admissions(fit_inbox), _admissions(Inbox(), own=2)
    flags = [first.flag(_VIEW), second.flag(_VIEW)]
    for one in (first, second):
        one.note(flags)
        assert one.wanted_size == 3
        assert one.is_change_due


def test_all_wait_for_one_that_is_not_prepared(fit_inbox) -> None:
    first, second = _admissions(fit_inbox), _admissions(Inbox(), own=2, prepares=True)
    first.note([first.flag(_VIEW), second.flag(_VIEW)])
    assert first.wanted_size == 3
    assert not first.is_change_due
    second.prepared_for = 3
    first.note([first.flag(_VIEW), second.flag(_VIEW)])
    assert first.is_change_due


@pytest.mark.parametrize("change", ["elsewhere", "unsafe", "ended"])
def test_nothing_is_wanted_without_a_process_at_this_place(fit_inbox, change) -> None:
    first = _admissions(fit_inbox)
    if change == "elsewhere":
        first.safe = SafePoint("fit:2", 5)
    if change == "unsafe":
        first.safe = None
    if change == "ended":
        fit_inbox.close()
    first.note([first.flag(_VIEW), 2])
    assert first.wanted_size is None
    assert not first.is_change_due


def test_a_new_view_starts_again(fit_inbox) -> None:
    first = _admissions(fit_inbox)
    first.note([first.flag(_VIEW), 2])
    first.begin_view(View(2, (0, 1, 2), 5, (10, 11, 12), newcomers=(1,)))
    assert not first.is_change_due
    assert first.newcomers == (1,)
    assert not first.is_new


def test_a_round_that_is_no_step_adds_no_member_after_a_loss(fit_inbox) -> None:
    """Those that join begin with a step, and would not take part in it."""
    one = _admissions(fit_inbox)
    one.pass_by()
    assert (one.safe.place, one.safe.num_rounds) == ("fit:1", -1)
    one.end_place()
    one.pass_by()
    assert one.safe is None


# States that are sent to newcomers, over connections in one process.

_COUNT = 4
_STATE = TrainingState(
    {"step": 3},
    [
        np.arange(200_000, dtype=np.float32).reshape(1000, 200).T,
        np.float64(2.5),
        np.empty((0, 3), np.int8),
        np.array([True, False]),
        np.full(3, 1.5, ml_dtypes.bfloat16),
        *(np.full(2, number) for number in range(2000)),
    ],
)


@pytest.fixture
def handover_peers() -> Iterator[list[PeerConnections]]:
    connections = connected_peers(_COUNT, lambda waited_s: None)
    yield connections
    for one in connections:
        one.close()


def _exchange(
    handover_peers: list[PeerConnections], check: Any = lambda document: None
) -> list[Any]:
    """Member 1 sends its state to members 0 and 3."""

    def act(own: int) -> Any:
        if own in (0, 3):
            return receive(handover_peers[own], 1, [0, 3], check)
        return hand_over(handover_peers[own], 1, [0, 3], (lambda: _STATE) if own == 1 else None)

    return together(_COUNT, act)


def test_newcomers_receive_the_document_and_all_arrays(handover_peers) -> None:
    received = _exchange(handover_peers)
    for one in (received[0], received[3]):
        assert one.document == _STATE.document
        assert len(one.arrays) == len(_STATE.arrays)
        for mine, theirs in zip(one.arrays, map(np.asarray, _STATE.arrays), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)
    # All can go on with the round.
    assert together(_COUNT, lambda own: handover_peers[own].barrier(own)) == [[0, 1, 2, 3]] * _COUNT


def test_changed_data_is_an_error(handover_peers, monkeypatch) -> None:
    monkeypatch.setattr(joining, "_check_sum", _check_all_but_one(joining._check_sum))
    errors = _exchange(handover_peers)
    for one in (errors[0], errors[3]):
        assert isinstance(one, DataLossError)
        assert "The CRC-32 of array 1 that a member sent is" in str(one)


def _check_all_but_one(original: Any) -> Any:
    def check(found: int, expected: int, name: str) -> None:
        original(found ^ (name == "array 1"), expected, name)

    return check


def test_a_document_that_does_not_fit_is_an_error_before_arrays_are_sent(handover_peers) -> None:
    def refuse(document: dict[str, Any]) -> None:
        raise ValueError(f"not {document}")

    def act(own: int) -> Any:
        if own == 3:
            with (
                handover_peers[own]._sockets[1],
                pytest.raises(ValueError, match=r"not \{'step': 3\}"),
            ):
                receive(handover_peers[own], 1, [3], refuse)
            return None
        return None if own != 1 else hand_over(handover_peers[own], 1, [3], lambda: _STATE)

    error = together(_COUNT, act)[1]
    assert isinstance(error, ConnectionError)


def test_a_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(DataLossError, match="received an array of dtype"):
        joining._dtype("i4,(2)f8")


# Processes that are started again, with members that train.


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
