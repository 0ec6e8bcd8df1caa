"""A process that waits to join a group, with members that are made up."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.elastic import inbox as candidacy
from stratagem.group.elastic.changes import SafePoint, ViewChanges
from stratagem.group.elastic.inbox import (
    DATA,
    Candidacy,
    EndedError,
    Inbox,
    RunningGroup,
    Stage,
    receive_message,
    send_message,
)
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.rounds import Admissions, connect_view
from stratagem.group.elastic.views import Report, View
from stratagem.group.verdict import GroupLimits
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


# Decisions of the lowest member that is left, with peers that are made up.

_LABELS = tuple(f"worker {member}" for member in range(4))


class _ChangesPeers:
    """Peers of member 0."""

    own, labels, incarnation = 0, _LABELS, 0

    def __init__(self, lost: Collection[int] = (), silent: Collection[int] = ()) -> None:
        self._lost, self._silent = {*lost, *silent}, silent

    def is_lost(self, member: int) -> bool:
        return member in self._lost

    def is_silent(self, member: int) -> bool:
        return member in self._silent


def _changes(
    peers: Any, *members: int, waiting: Collection[int] = ()
) -> tuple[ViewChanges, list[socket.socket]]:
    """Returns changes for which members have reported, and the other sides of the connections.

    Those that wait to join come last.
    """
    inbox = Inbox()
    sides: list[socket.socket] = []
    for member in members:
        theirs, ours = socket.socketpair()
        report = {"member": member, "view": 0, "num_rounds": 5, "is_complete": False}
        send_message(theirs, report, 1)
        inbox.admit(ours, f"report {member} 0")
        sides.append(theirs)
    inbox.tell(stage=Stage.TRAINS)
    for member in waiting:
        theirs, ours = socket.socketpair()
        inbox.admit(ours, f"ready {member} {100 + member} fit:1")
        sides.append(theirs)
    return ViewChanges(peers, inbox, _LIMITS), sides


_LIMITS = GroupLimits(join_s=0.1, peer_s=1, stuck_s=0.1, barrier_s=1)
_OWN = Report(0, 0, 5, is_complete=True)
_VIEW = View(0, (0, 1, 2, 3), 0, (0, 0, 0, 0))


def test_all_get_the_view_of_those_that_are_left() -> None:
    changes, sides = _changes(_ChangesPeers(lost=[2]), 1, 3)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN) == View(1, (0, 1, 3), 5, (0, 0, 0))
    for one in sides:
        assert View.of_message(receive_message(one, 1)) == View(1, (0, 1, 3), 5, (0, 0, 0))
        one.close()


def test_half_of_the_members_go_on_if_the_others_have_ended() -> None:
    changes, (side,) = _changes(_ChangesPeers(lost=[2, 3]), 1)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN).members == (0, 1)
    side.close()


def test_half_of_the_members_stop_if_the_others_may_go_on() -> None:
    changes, (side,) = _changes(_ChangesPeers(lost=[2], silent=[3]), 1)
    with pytest.raises(UnavailableError, match="only 2 of 4 members are left"):
        changes.next_view(View(0, (0, 1, 2, 3)), _OWN)
    assert "more than half of the members" in receive_message(side, 1)["error"]
    side.close()


def test_most_members_go_on_without_a_silent_one() -> None:
    changes, sides = _changes(_ChangesPeers(silent=[3]), 1, 2)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN).members == (0, 1, 2)
    for one in sides:
        one.close()


def test_a_member_that_runs_and_does_not_report_is_named() -> None:
    changes, _ = _changes(_ChangesPeers())
    with pytest.raises(DeadlineExceededError, match="worker 1 still runs, but has not reached"):
        changes.next_view(View(0, (0, 1)), _OWN)


def _close(changes: ViewChanges, sides: list[socket.socket]) -> None:
    changes._inbox.close()
    for one in sides:
        one.close()


def test_a_process_that_waits_takes_the_place_of_a_lost_member() -> None:
    changes, sides = _changes(_ChangesPeers(lost=[2]), 1, 3, waiting=[2])
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found == View(1, (0, 1, 2, 3), 5, (0, 0, 102, 0), newcomers=(2,))
    for one in sides:
        assert View.of_message(receive_message(one, 1)) == found
    _close(changes, sides)


@pytest.mark.parametrize(
    ("safe", "is_due"),
    [(None, False), (SafePoint("fit:1", 4), True), (SafePoint("fit:2", 5), False)],
    ids=["unsafe", "after a round", "at another place"],
)
def test_a_process_that_waits_is_not_added_elsewhere(safe, is_due) -> None:
    changes, sides = _changes(_ChangesPeers(lost=[2]), 1, 3, waiting=[2])
    found = changes.next_view(_VIEW, _OWN, safe)
    assert found == View(1, (0, 1, 3), 5, (0, 0, 0), is_change_due=is_due)
    _close(changes, sides)


def test_one_that_waited_and_ended_is_not_added() -> None:
    changes, sides = _changes(_ChangesPeers(lost=[2]), 1, 3, waiting=[2])
    sides.pop().close()
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found.members == (0, 1, 3)
    _close(changes, sides)


def test_one_that_was_added_can_report_at_once_that_the_view_is_broken() -> None:
    """Before the lowest member begins to connect: it must not take it for a stranger."""
    changes, sides = _changes(_ChangesPeers(lost=[2]), 1, 3, waiting=[2])
    changes._inbox.begin_view(_VIEW.number, _VIEW.expected)
    changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    theirs, ours = socket.socketpair()
    sides.append(theirs)
    changes._inbox.admit(ours, "report 2 102")
    assert changes._inbox.has_report()
    _close(changes, sides)


# Connections of a view between members in threads, with peers that are made up.

_VIEW_OF_VIEW_CONNECTIONS = View(4, (0, 2, 5), 9, (10, 12, 15))
_LIMIT_S = 120.0


class _ViewConnectionsPeers:
    """Peers of one member, which reach the inboxes of the others without a network."""

    def __init__(self, own: int, inboxes: dict[int, Inbox], lost: tuple[int, ...] = ()) -> None:
        self.own, self._inboxes, self._lost = own, inboxes, lost
        self.expected: dict[int, int] = {}
        self.have_started = False
        self.dialed: list[socket.socket] = []

    def dial_data(self, member: int, view: int) -> socket.socket:
        if member in self._lost:
            raise ConnectionRefusedError(f"member {member} has ended")
        theirs, ours = socket.socketpair()
        self._inboxes[member].admit(theirs, f"{DATA} {view} {self.own}")
        self.dialed.append(ours)
        return ours


@pytest.fixture
def inboxes() -> Iterator[dict[int, Inbox]]:
    made = {member: Inbox() for member in _VIEW_OF_VIEW_CONNECTIONS.members}
    yield made
    for inbox in made.values():
        inbox.close()


def _never(waited_s: float) -> None:
    assert waited_s < _LIMIT_S


def _connect(peers: Any, inbox: Inbox, check: Any = _never) -> PeerConnections:
    return connect_view(_VIEW_OF_VIEW_CONNECTIONS, peers, inbox, check)


def test_all_members_are_connected_with_all_others(inboxes) -> None:
    peers = {
        member: _ViewConnectionsPeers(member, inboxes)
        for member in _VIEW_OF_VIEW_CONNECTIONS.members
    }

    def act(rank: int) -> list[int]:
        own = _VIEW_OF_VIEW_CONNECTIONS.members[rank]
        connections = _connect(peers[own], inboxes[own])
        try:
            connections.begin_round(1, "round")
            return connections.barrier(own)
        finally:
            connections.close()

    assert together(3, act) == [[0, 2, 5]] * 3
    for one in peers.values():
        assert one.expected == {0: 10, 2: 12, 5: 15}
        assert one.have_started


def test_a_lower_member_that_has_ended_breaks_the_view(inboxes) -> None:
    peers = _ViewConnectionsPeers(5, inboxes, lost=(2,))
    with pytest.raises(PeerLostError, match="member 2 has ended"):
        _connect(peers, inboxes[5])
    (opened,) = peers.dialed
    assert opened.fileno() == -1
    assert not peers.have_started


def test_a_higher_member_that_does_not_come_breaks_the_view(inboxes) -> None:
    """The check is asked while it waits, and ends the connections that there are."""
    theirs, ours = socket.socketpair()
    inboxes[0].admit(ours, f"{DATA} 4 2")
    waits: list[float] = []

    def check(waited_s: float) -> None:
        waits.append(waited_s)
        if len(waits) == 3:
            raise PeerLostError("process 5 does not answer")

    with theirs, pytest.raises(PeerLostError, match="process 5 does not answer"):
        _connect(_ViewConnectionsPeers(0, inboxes), inboxes[0], check)
    assert waits == sorted(waits)
    assert ours.fileno() == -1


def test_a_connection_for_another_view_is_not_taken(inboxes) -> None:
    sides = [socket.socketpair() for _ in range(2)]
    for (_, ours), view in zip(sides, (3, 5), strict=True):
        inboxes[2].admit(ours, f"{DATA} {view} 5")

    def check(waited_s: float) -> None:
        raise PeerLostError("no connection of view 4")

    with pytest.raises(PeerLostError, match="no connection of view 4"):
        _connect(_ViewConnectionsPeers(2, inboxes), inboxes[2], check)
    assert [ours.fileno() == -1 for _, ours in sides] == [True, False]
    for theirs, _ in sides:
        theirs.close()


def test_one_that_leaves_while_it_connects_keeps_no_connections(inboxes) -> None:
    peers = _ViewConnectionsPeers(5, inboxes)
    inboxes[5].close()
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        _connect(peers, inboxes[5])
    assert [one.fileno() for one in peers.dialed] == [-1, -1]
    assert not peers.have_started


# What members say in commits, and when they admit others.

_VIEW_OF_ADMISSIONS = View(1, (0, 2), 5, (10, 12))


@pytest.fixture
def inbox_of_admissions():
    """An inbox in which process 1 waits to join `fit`."""
    made, (theirs, ours) = Inbox(), socket.socketpair()
    made.tell(stage=Stage.TRAINS)
    made.admit(ours, "ready 1 11 fit:1")
    yield made
    made.close()
    theirs.close()


def _admissions(inbox_of_admissions: Inbox, own: int = 0, *, prepares: bool = False) -> Admissions:
    made = Admissions(inbox_of_admissions, own, prepares=prepares)
    made.safe = SafePoint("fit:1", 5)
    return made


def test_the_first_member_wants_a_change_that_all_agree_on(inbox_of_admissions) -> None:
    first, second = _admissions(inbox_of_admissions), _admissions(Inbox(), own=2)
    flags = [first.flag(_VIEW_OF_ADMISSIONS), second.flag(_VIEW_OF_ADMISSIONS)]
    for one in (first, second):
        one.note(flags)
        assert one.wanted_size == 3
        assert one.is_change_due


def test_all_wait_for_one_that_is_not_prepared(inbox_of_admissions) -> None:
    first, second = _admissions(inbox_of_admissions), _admissions(Inbox(), own=2, prepares=True)
    first.note([first.flag(_VIEW_OF_ADMISSIONS), second.flag(_VIEW_OF_ADMISSIONS)])
    assert first.wanted_size == 3
    assert not first.is_change_due
    second.prepared_for = 3
    first.note([first.flag(_VIEW_OF_ADMISSIONS), second.flag(_VIEW_OF_ADMISSIONS)])
    assert first.is_change_due


@pytest.mark.parametrize("change", ["elsewhere", "unsafe", "ended"])
def test_nothing_is_wanted_without_a_process_at_this_place(inbox_of_admissions, change) -> None:
    first = _admissions(inbox_of_admissions)
    if change == "elsewhere":
        first.safe = SafePoint("fit:2", 5)
    if change == "unsafe":
        first.safe = None
    if change == "ended":
        inbox_of_admissions.close()
    first.note([first.flag(_VIEW_OF_ADMISSIONS), 2])
    assert first.wanted_size is None
    assert not first.is_change_due


def test_a_new_view_starts_again(inbox_of_admissions) -> None:
    first = _admissions(inbox_of_admissions)
    first.note([first.flag(_VIEW_OF_ADMISSIONS), 2])
    first.begin_view(View(2, (0, 1, 2), 5, (10, 11, 12), newcomers=(1,)))
    assert not first.is_change_due
    assert first.newcomers == (1,)
    assert not first.is_new


def test_a_round_that_is_no_step_adds_no_member_after_a_loss(inbox_of_admissions) -> None:
    """Those that join begin with a step, and would not take part in it."""
    one = _admissions(inbox_of_admissions)
    one.pass_by()
    assert one.safe is not None
    assert (one.safe.place, one.safe.num_rounds) == ("fit:1", -1)
    one.end_place()
    one.pass_by()
    assert one.safe is None
