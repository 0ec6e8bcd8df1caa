"""How processes of an elastic group reach each other: inboxes, dialing, connections of a view."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.elastic import peers as peers_module
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.peers import (
    DATA,
    PROBE,
    PURPOSE,
    READY,
    REPORT,
    EndedError,
    Inbox,
    Peers,
    Stage,
    connect_view,
    receive_message,
)
from stratagem.group.elastic.views import View
from tests.unit.group.authentication.peers import is_closed
from tests.unit.group.process_group.members import together

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
    assert is_closed(first)
    assert not is_closed(second)


def test_a_new_view_ends_the_connections_of_those_before(inbox, admit) -> None:
    earlier, present, later = (admit(f"{DATA} {view} 1") for view in (2, 3, 4))
    inbox.begin_view(3, {0: 70, 1: 7})
    assert [is_closed(one) for one in (earlier, present, later)] == [True, False, False]


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
    assert not is_closed(waiting["1 7"])
    assert _is_refused(waiting["2 8"])  # the process before the member
    assert _is_refused(waiting["3 9"])
    assert _is_refused(admit(f"{REPORT} 1 6"))
    assert not is_closed(admit(f"{REPORT} 2 88"))


@pytest.mark.parametrize("stage", [Stage.STARTS, Stage.WAITS])
def test_nobody_waits_to_join_one_that_does_not_train(inbox, admit, stage) -> None:
    inbox.tell(stage=stage)
    assert is_closed(admit(f"{READY} 1 7 loop"))
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
    admit(f"{READY} 6 106 loop").close()  # it has ended
    taken = inbox.take_candidates("loop", (0, 4))
    assert [(member, one.incarnation) for member, one in taken.items()] == [(3, 103), (5, 105)]
    left = inbox.take_candidates("loop", (0,))
    assert list(left) == [4]
    assert not inbox.has_candidate("loop", (0,))
    assert inbox.has_candidate("fit:1", (0,))
    for one in (*taken.values(), *left.values()):
        one.connection.close()


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


def test_a_closed_inbox_ends_all_connections_and_takes_no_more(inbox, admit) -> None:
    inbox.check_open()
    claims = [f"{DATA} 3 1", f"{REPORT} 1 7", f"{READY} 2 8 loop"]
    before = [admit(claim) for claim in claims]
    inbox.close()
    after = [admit(claim) for claim in [*claims, PROBE]]
    assert all(map(is_closed, [*before, *after]))
    assert inbox.take_data(3, 1) is None
    assert inbox.take_report(1) is None
    assert not inbox.has_candidate("loop", ())
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        inbox.check_open()


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

    monkeypatch.setattr(peers_module, "reach", unreachable)
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
def test_another_process_at_the_address_proves_that_a_member_ended(expected, is_lost) -> None:
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


# Connections of a view between members in threads, with peers that are made up.

_VIEW = View(4, (0, 2, 5), 9, (10, 12, 15))


class _Peers:
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
    made = {member: Inbox() for member in _VIEW.members}
    yield made
    for inbox in made.values():
        inbox.close()


def _never(waited_s: float) -> None:
    assert waited_s < _LIMIT_S


def _connect(peers: Any, inbox: Inbox, check: Any = _never) -> PeerConnections:
    return connect_view(_VIEW, peers, inbox, check)


def test_all_members_are_connected_with_all_others(inboxes) -> None:
    peers = {member: _Peers(member, inboxes) for member in _VIEW.members}

    def act(rank: int) -> list[int]:
        own = _VIEW.members[rank]
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
    peers = _Peers(5, inboxes, lost=(2,))
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
        _connect(_Peers(0, inboxes), inboxes[0], check)
    assert waits == sorted(waits)
    assert ours.fileno() == -1


def test_a_connection_for_another_view_is_not_taken(inboxes) -> None:
    sides = [socket.socketpair() for _ in range(2)]
    for (_, ours), view in zip(sides, (3, 5), strict=True):
        inboxes[2].admit(ours, f"{DATA} {view} 5")

    def check(waited_s: float) -> None:
        raise PeerLostError("no connection of view 4")

    with pytest.raises(PeerLostError, match="no connection of view 4"):
        _connect(_Peers(2, inboxes), inboxes[2], check)
    assert [ours.fileno() == -1 for _, ours in sides] == [True, False]
    for theirs, _ in sides:
        theirs.close()


def test_one_that_leaves_while_it_connects_keeps_no_connections(inboxes) -> None:
    peers = _Peers(5, inboxes)
    inboxes[5].close()
    with pytest.raises(RuntimeError, match="has left its elastic group"):
        _connect(peers, inboxes[5])
    assert [one.fileno() for one in peers.dialed] == [-1, -1]
    assert not peers.have_started
