"""Connections that wait in an inbox, each with its other side in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from stratagem.group.elastic.inbox import DATA, PROBE, READY, REPORT, Inbox, Stage, receive_message

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


def test_candidates_are_taken_once_in_their_order_and_up_to_a_number(inbox, admit) -> None:
    for member in (5, 3, 4, 2):
        admit(f"{READY} {member} {member + 100} {'loop' if member != 2 else 'fit:1'}")
    taken = inbox.take_candidates("loop", (0,), 2)
    assert {member: one.incarnation for member, one in taken.items()} == {3: 103, 4: 104}
    left = inbox.take_candidates("loop", (0,), 2)
    assert list(left) == [5]
    assert inbox.has_candidate("fit:1", (0,))
    for one in (*taken.values(), *left.values()):
        one.connection.close()


def test_candidates_that_have_ended_are_not_taken(inbox, admit) -> None:
    admit(f"{READY} 1 7 loop").close()
    assert inbox.take_candidates("loop", (0,), 1) == {}
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
        "num_backups": 0,
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
