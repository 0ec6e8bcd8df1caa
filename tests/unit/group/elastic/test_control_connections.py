"""Connections for the choice of participants."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from stratagem.group.elastic.inbox import Inbox
from stratagem.group.elastic.peer_connections import PeerLostError
from stratagem.group.elastic.rounds import connect_controls
from stratagem.group.elastic.views import View

_VIEW = View(3, (1, 2, 5))


class _Peers:
    def __init__(self, own: int, answer: socket.socket | OSError) -> None:
        self.own, self._answer = own, answer
        self.dialed: list[tuple[int, int]] = []

    def dial_control(self, member: int, view: int) -> socket.socket:
        self.dialed.append((member, view))
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer


def _connect(peers: Any, inbox: Inbox, check: Any = None) -> dict[int, socket.socket]:
    with contextlib.ExitStack() as stack:
        found = connect_controls(_VIEW, peers, inbox, check, stack)
        stack.pop_all()
        return found


def test_a_member_connects_to_the_lowest_one() -> None:
    own, other = socket.socketpair()
    with own, other:
        peers = _Peers(5, own)
        assert _connect(peers, Inbox()) == {1: own}
        assert peers.dialed == [(1, 3)]


def test_the_lowest_member_has_those_of_all_others() -> None:
    inbox = Inbox()
    pairs = {member: socket.socketpair() for member in (2, 5)}
    for member, (own, _) in pairs.items():
        inbox.admit(own, f"control 3 {member}")
    found = _connect(_Peers(1, OSError()), inbox)
    assert found == {member: own for member, (own, _) in pairs.items()}
    for pair in pairs.values():
        for one in pair:
            one.close()


def test_a_member_that_is_lost_meanwhile_breaks_the_view() -> None:
    with pytest.raises(PeerLostError, match="refused"):
        _connect(_Peers(2, ConnectionRefusedError("refused")), Inbox())

    def check(waited_s: float) -> None:
        raise PeerLostError(f"after {waited_s} s")

    with pytest.raises(PeerLostError, match="after"):
        _connect(_Peers(1, OSError()), Inbox(), check)
