"""Decisions of the lowest member that is left, with peers that are made up."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

import pytest

from stratagem.elastic.changes import ViewChanges
from stratagem.elastic.reaching import Inbox, receive_message, send_message
from stratagem.elastic.views import Report, View
from stratagem.errors import DeadlineExceededError, UnavailableError

_LABELS = tuple(f"worker {member}" for member in range(4))


class _Peers:
    """Peers of member 0."""

    own, labels = 0, _LABELS

    def __init__(self, lost: Collection[int] = (), silent: Collection[int] = ()) -> None:
        self._lost, self._silent = {*lost, *silent}, silent

    def is_lost(self, member: int) -> bool:
        return member in self._lost

    def is_silent(self, member: int) -> bool:
        return member in self._silent


def _changes(peers: Any, *members: int) -> tuple[ViewChanges, list[socket.socket]]:
    """Returns changes for which members have reported, and their sides of the connections."""
    inbox = Inbox()
    sides: list[socket.socket] = []
    for member in members:
        theirs, ours = socket.socketpair()
        report = {"member": member, "view": 0, "num_rounds": 5, "is_complete": False}
        send_message(theirs, report, 1)
        inbox.admit(ours, f"report {member}")
        sides.append(theirs)
    return ViewChanges(peers, inbox, peer_s=1, start_s=0.1, stuck_s=0.1), sides


_OWN = Report(0, 0, 5, is_complete=True)


def test_all_get_the_view_of_those_that_are_left() -> None:
    changes, sides = _changes(_Peers(lost=[2]), 1, 3)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN) == View(1, (0, 1, 3), 5)
    for one in sides:
        wanted = {"number": 1, "members": [0, 1, 3], "num_rounds": 5, "behind": []}
        assert receive_message(one, 1) == wanted
        one.close()


def test_half_of_the_members_go_on_if_the_others_have_ended() -> None:
    changes, (side,) = _changes(_Peers(lost=[2, 3]), 1)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN).members == (0, 1)
    side.close()


def test_half_of_the_members_stop_if_the_others_may_go_on() -> None:
    changes, (side,) = _changes(_Peers(lost=[2], silent=[3]), 1)
    with pytest.raises(UnavailableError, match="only 2 of 4 members are left"):
        changes.next_view(View(0, (0, 1, 2, 3)), _OWN)
    assert "more than half of the members" in receive_message(side, 1)["error"]
    side.close()


def test_most_members_go_on_without_a_silent_one() -> None:
    changes, sides = _changes(_Peers(silent=[3]), 1, 2)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN).members == (0, 1, 2)
    for one in sides:
        one.close()


def test_a_member_that_runs_and_does_not_report_is_named() -> None:
    changes, _ = _changes(_Peers())
    with pytest.raises(DeadlineExceededError, match="worker 1 still runs, but has not reached"):
        changes.next_view(View(0, (0, 1)), _OWN)
