"""Connections of a view between members in threads, with peers that are made up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.group.elastic.inbox import DATA, Inbox
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.rounds import connect_view
from stratagem.group.elastic.views import View
from tests.unit.group.process_group.members import together

_VIEW = View(4, (0, 2, 5), 9, (10, 12, 15))
_LIMIT_S = 120.0


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
