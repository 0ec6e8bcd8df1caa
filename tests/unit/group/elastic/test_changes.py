"""Decisions of the lowest member that is left, with peers that are made up."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.elastic.changes import SafePoint, ViewChanges
from stratagem.group.elastic.inbox import Inbox, Stage, receive_message, send_message
from stratagem.group.elastic.views import Report, View
from stratagem.group.verdict import GroupLimits

_LABELS = tuple(f"worker {member}" for member in range(4))


class _Peers:
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
    return ViewChanges(peers, inbox, _LIMITS, most=4), sides


_LIMITS = GroupLimits(join_s=0.1, peer_s=1, stuck_s=0.1, barrier_s=1)
_OWN = Report(0, 0, 5, is_complete=True)
_VIEW = View(0, (0, 1, 2, 3), 0, (0, 0, 0, 0))


def test_all_get_the_view_of_those_that_are_left() -> None:
    changes, sides = _changes(_Peers(lost=[2]), 1, 3)
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN) == View(1, (0, 1, 3), 5, (0, 0, 0))
    for one in sides:
        assert View.of_message(receive_message(one, 1)) == View(1, (0, 1, 3), 5, (0, 0, 0))
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


def _close(changes: ViewChanges, sides: list[socket.socket]) -> None:
    changes._inbox.close()
    for one in sides:
        one.close()


def test_a_process_that_waits_takes_the_place_of_a_lost_member() -> None:
    changes, sides = _changes(_Peers(lost=[2]), 1, 3, waiting=[2])
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
    changes, sides = _changes(_Peers(lost=[2]), 1, 3, waiting=[2])
    found = changes.next_view(_VIEW, _OWN, safe)
    assert found == View(1, (0, 1, 3), 5, (0, 0, 0), is_change_due=is_due)
    _close(changes, sides)


def test_a_full_group_adds_nobody() -> None:
    changes, sides = _changes(_Peers(), 1, 2, 3, waiting=[4])
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found.members == (0, 1, 2, 3)
    _close(changes, sides)


def test_one_that_waited_and_ended_is_not_added() -> None:
    changes, sides = _changes(_Peers(lost=[2]), 1, 3, waiting=[2])
    sides.pop().close()
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found.members == (0, 1, 3)
    _close(changes, sides)


def test_one_that_was_added_can_report_at_once_that_the_view_is_broken() -> None:
    """Before the lowest member begins to connect: it must not take it for a stranger."""
    changes, sides = _changes(_Peers(lost=[2]), 1, 3, waiting=[2])
    changes._inbox.begin_view(_VIEW.number, _VIEW.expected)
    changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    theirs, ours = socket.socketpair()
    sides.append(theirs)
    changes._inbox.admit(ours, "report 2 102")
    assert changes._inbox.has_report()
    _close(changes, sides)
