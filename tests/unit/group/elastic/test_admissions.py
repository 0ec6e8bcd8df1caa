"""What members say in commits, and when they admit others."""

from __future__ import annotations

import socket

import pytest

from stratagem.group.elastic.changes import SafePoint
from stratagem.group.elastic.inbox import Inbox, Stage
from stratagem.group.elastic.rounds import Admissions
from stratagem.group.elastic.views import View

_VIEW = View(1, (0, 2), 5, (10, 12))


@pytest.fixture
def inbox():
    """An inbox in which process 1 waits to join `fit`."""
    made, (theirs, ours) = Inbox(), socket.socketpair()
    made.tell(stage=Stage.TRAINS)
    made.admit(ours, "ready 1 11 fit:1")
    yield made
    made.close()
    theirs.close()


def _admissions(inbox: Inbox, own: int = 0, *, most: int = 3, prepares: bool = False) -> Admissions:
    made = Admissions(inbox, own, most=most, prepares=prepares)
    made.safe = SafePoint("fit:1", 5)
    return made


def test_the_first_member_wants_a_change_that_all_agree_on(inbox) -> None:
    first, second = _admissions(inbox), _admissions(Inbox(), own=2)
    flags = [first.flag(_VIEW), second.flag(_VIEW)]
    for one in (first, second):
        one.note(flags)
        assert one.wanted_size == 3
        assert one.is_change_due


def test_all_wait_for_one_that_is_not_prepared(inbox) -> None:
    first, second = _admissions(inbox), _admissions(Inbox(), own=2, prepares=True)
    first.note([first.flag(_VIEW), second.flag(_VIEW)])
    assert first.wanted_size == 3
    assert not first.is_change_due
    second.prepared_for = 3
    first.note([first.flag(_VIEW), second.flag(_VIEW)])
    assert first.is_change_due


@pytest.mark.parametrize("change", ["full", "elsewhere", "unsafe", "ended"])
def test_nothing_is_wanted_without_room_or_a_process_at_this_place(inbox, change) -> None:
    first = _admissions(inbox, most=2 if change == "full" else 3)
    if change == "elsewhere":
        first.safe = SafePoint("fit:2", 5)
    if change == "unsafe":
        first.safe = None
    if change == "ended":
        inbox.close()
    first.note([first.flag(_VIEW), 2])
    assert first.wanted_size is None
    assert not first.is_change_due


def test_one_with_backups_takes_no_candidate() -> None:
    made, (theirs, ours) = Inbox(num_backups=1), socket.socketpair()
    made.tell(stage=Stage.TRAINS)
    made.admit(ours, "ready 1 11 fit:1")
    assert theirs.recv(1) == b""
    assert not made.has_candidate("fit:1", _VIEW.members)
    theirs.close()


def test_a_new_view_starts_again(inbox) -> None:
    first = _admissions(inbox)
    first.note([first.flag(_VIEW), 2])
    first.begin_view(View(2, (0, 1, 2), 5, (10, 11, 12), newcomers=(1,)))
    assert not first.is_change_due
    assert first.newcomers == (1,)
    assert not first.is_new


def test_a_round_that_is_no_step_adds_no_member_after_a_loss(inbox) -> None:
    """Those that join begin with a step, and would not take part in it."""
    one = _admissions(inbox)
    one.pass_by()
    assert one.safe is not None
    assert (one.safe.place, one.safe.num_rounds) == ("fit:1", -1)
    one.end_place()
    one.pass_by()
    assert one.safe is None
