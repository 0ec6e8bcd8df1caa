"""A process that waits to join a group, with members that are made up."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.elastic import inbox as candidacy
from stratagem.group.elastic.inbox import (
    Candidacy,
    EndedError,
    Inbox,
    RunningGroup,
    Stage,
    send_message,
)
from stratagem.group.elastic.views import View

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
    monkeypatch.setattr(candidacy, "_LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(candidacy, "_RETRY_S", 0.001)
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
    ("members", "own", "most", "expected"),
    [
        ((0, 2), 1, 3, (0, 1, 2)),
        ((0, 1, 2), 1, 3, (0, 1, 2)),  # the others have not noticed the loss of the one before
        ((0, 1, 2), 3, 3, (0, 1, 3)),  # a spare takes a place once there is one
        ((2,), 0, 1, (0,)),
    ],
)
def test_the_expected_view_has_this_process_and_no_more_than_the_most(
    members, own, most, expected
) -> None:
    group = RunningGroup(6, members, None, 0)
    assert group.with_candidate(own, most) == View(6, expected)


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


@pytest.mark.parametrize("answer", [EndedError("ended"), {"stage": Stage.WAITS}], ids=str)
def test_a_group_that_has_ended_is_an_error_at_once(made, answer) -> None:
    _, one, _ = made({1: answer})
    with pytest.raises(UnavailableError, match="All members ended before worker 3 could join them"):
        one.look()


def test_members_that_never_answer_have_ended_after_the_limit(made) -> None:
    _, one, _ = made({1: TimeoutError()}, peer_s=0.01)
    with pytest.raises(UnavailableError, match="All members ended before"):
        one.look()


def test_one_that_leaves_looks_no_more(made) -> None:
    peers, one, inbox = made({1: TimeoutError()})
    peers.on_probe = inbox.close
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        one.look()


def test_a_process_gets_the_view_of_the_lowest_member(made) -> None:
    peers, one, _ = made({1: _running(), 2: _running()})
    peers.on_dial = _send_view
    assert one.wait("fit:1", _never_over) == _JOINED
    assert peers.dialed == [(1, "fit:1")]


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


def test_if_the_leader_dies_the_next_member_is_asked(made) -> None:
    peers, one, _ = made({1: _running(), 2: _running()})

    def die(member: int, side: socket.socket) -> None:
        if member == 2:
            _send_view(member, side)
            return
        peers.answers = {2: _running(5, 2)}
        side.close()

    peers.on_dial = die
    assert one.wait("fit:1", _never_over) == _JOINED
    assert peers.dialed == [(1, "fit:1"), (2, "fit:1")]


def test_if_the_leader_is_cut_off_the_next_member_is_asked(made) -> None:
    """Its connection is whole, but the others have continued without it."""
    peers, one, _ = made({1: _running(), 2: _running()})

    def lose(member: int, side: socket.socket) -> None:
        if member == 2:
            _send_view(member, side)
        else:
            peers.answers = {1: TimeoutError(), 2: _running(5, 2)}

    peers.on_dial = lose
    assert one.wait("fit:1", _never_over) == _JOINED
    assert peers.dialed == [(1, "fit:1"), (2, "fit:1")]


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


def test_a_group_that_ends_while_a_process_waits_is_an_error(made) -> None:
    peers, one, _ = made({1: _running()})

    def end(member: int, side: socket.socket) -> None:
        peers.answers = {}
        side.close()

    peers.on_dial = end
    with pytest.raises(UnavailableError, match="All members ended before worker 3 could join them"):
        one.wait("fit:1", _never_over)


def test_a_spare_of_a_group_that_ends_gets_the_reason(make_cluster) -> None:
    cluster = make_cluster(3, num_spares=1)
    groups = cluster.started(2)
    spare = cluster.member(2)
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
        spare.join("loop", look)
    thread.join()
    assert spare.is_candidate
