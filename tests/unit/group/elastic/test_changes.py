"""Changes of the view: decisions of the lowest member that is left, and pauses of training."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.elastic import group as group_module
from stratagem.group.elastic.changes import TrainingPauses, ViewChanges
from stratagem.group.elastic.joining import SafePoint
from stratagem.group.elastic.peers import Inbox, Stage, receive_message, send_message
from stratagem.group.elastic.views import Report, View
from stratagem.group.verdict import GroupLimits
from stratagem.observe.events import MembersEvent
from tests.unit.group.elastic.members import Training
from tests.unit.observe.test_wait_clock import ticking

# Decisions of the lowest member, with peers that are made up.

_LABELS = tuple(f"worker {member}" for member in range(4))


class _Peers:
    """Peers of member 0."""

    own, labels, incarnation = 0, _LABELS, 0

    def __init__(self, lost: Collection[int] = (), silent: Collection[int] = ()) -> None:
        self._lost, self._silent = {*lost, *silent}, silent

    def ask_for_stacks(self) -> None:
        """The inbox of the member prints its own."""

    def is_lost(self, member: int) -> bool:
        return member in self._lost

    def is_silent(self, member: int) -> bool:
        return member in self._silent


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[ViewChanges, list[socket.socket]]]]:
    """Returns changes for which members have reported, and the other sides of the connections.

    Those that wait to join come last.
    """
    inbox = Inbox()
    sides: list[socket.socket] = []

    def make_changes(peers: Any, *members: int, waiting: Collection[int] = ()) -> Any:
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

    yield make_changes
    inbox.close()
    for one in sides:
        one.close()


_LIMITS = GroupLimits(join_s=0.1, peer_s=1, stuck_s=0.1, barrier_s=1)
_OWN = Report(0, 0, 5, is_complete=True)
_VIEW = View(0, (0, 1, 2, 3), 0, (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("lost", "silent", "left"),
    [([2], [], (0, 1, 3)), ([2, 3], [], (0, 1)), ([], [3], (0, 1, 2))],
    ids=["one ended", "half ended", "one silent"],
)
def test_all_get_the_view_of_those_that_are_left(make, lost, silent, left) -> None:
    changes, sides = make(_Peers(lost, silent), *left[1:])
    expected = View(1, left, 5, (0,) * len(left))
    assert changes.next_view(View(0, (0, 1, 2, 3)), _OWN) == expected
    for one in sides:
        assert View.of_message(receive_message(one, 1)) == expected


def test_half_of_the_members_stop_if_the_others_may_go_on(make) -> None:
    changes, (side,) = make(_Peers(lost=[2], silent=[3]), 1)
    with pytest.raises(UnavailableError, match="only 2 of 4 members are left"):
        changes.next_view(View(0, (0, 1, 2, 3)), _OWN)
    assert "more than half of the members" in receive_message(side, 1)["error"]


def test_a_member_that_runs_and_does_not_report_is_named(make, capfd) -> None:
    changes, _ = make(_Peers())
    with pytest.raises(DeadlineExceededError, match="worker 1 still runs, but has not reached"):
        changes.next_view(View(0, (0, 1)), _OWN)
    assert "stacks at the time limit" in capfd.readouterr().err


def test_a_process_that_waits_takes_the_place_of_a_lost_member(make) -> None:
    changes, sides = make(_Peers(lost=[2]), 1, 3, waiting=[2])
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found == View(1, (0, 1, 2, 3), 5, (0, 0, 102, 0), newcomers=(2,))
    for one in sides:
        assert View.of_message(receive_message(one, 1)) == found


@pytest.mark.parametrize(
    ("safe", "is_due"),
    [(None, False), (SafePoint("fit:1", 4), True), (SafePoint("fit:2", 5), False)],
    ids=["unsafe", "after a round", "at another place"],
)
def test_a_process_that_waits_is_not_added_elsewhere(make, safe, is_due) -> None:
    changes, _ = make(_Peers(lost=[2]), 1, 3, waiting=[2])
    found = changes.next_view(_VIEW, _OWN, safe)
    assert found == View(1, (0, 1, 3), 5, (0, 0, 0), is_change_due=is_due)


def test_one_that_waited_and_ended_is_not_added(make) -> None:
    changes, sides = make(_Peers(lost=[2]), 1, 3, waiting=[2])
    sides.pop().close()
    found = changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    assert found.members == (0, 1, 3)


def test_one_that_was_added_can_report_at_once_that_the_view_is_broken(make) -> None:
    """Before the lowest member begins to connect: it must not take it for a stranger."""
    changes, sides = make(_Peers(lost=[2]), 1, 3, waiting=[2])
    changes._inbox.begin_view(_VIEW.number, _VIEW.expected)
    changes.next_view(_VIEW, _OWN, SafePoint("fit:1", 5))
    theirs, ours = socket.socketpair()
    sides.append(theirs)
    changes._inbox.admit(ours, "report 2 102")
    assert changes._inbox.has_report()


# Pauses while members change, against times computed by hand.

_TASKS = {0: "worker 0", 1: "worker 1", 2: "worker 2"}
_ALL = View(0, (0, 1, 2), incarnations=(5, 6, 7))
_WITHOUT_1 = View(1, (0, 2), incarnations=(5, 7))


class _Events:
    def __init__(self) -> None:
        self.found: list[MembersEvent] = []

    def members(self, event: MembersEvent) -> None:
        self.found.append(event)


def _pauses() -> tuple[TrainingPauses, list[MembersEvent]]:
    events: Any = _Events()
    return TrainingPauses(_TASKS, lambda: events), events.found


def _train(pauses: TrainingPauses, *ends_s: float, number: int = 0) -> None:
    for end_s in ends_s:
        pauses.end_step(number, end_s)


def _lost_and_joined(event: MembersEvent) -> tuple[list[str], list[str], int]:
    return event.lost, event.joined, event.num_members


def test_pause_is_the_time_between_two_steps_less_a_step() -> None:
    """Steps end at 1, 2, 3.5 and 4.5: the median is 1. The next one ends 3 seconds later."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3.5, 4.5)
    pauses.note_change(_ALL, _WITHOUT_1, 0.25)
    assert found == []
    _train(pauses, 7.5, 8.5, number=1)
    (event,) = found
    assert _lost_and_joined(event) == (["worker 1"], [], 2)
    assert (event.view, event.num_expected, event.monotonic_s) == (1, 3, 7.5)
    assert (event.change_s, event.pause_s, event.step_s) == (0.25, 2.0, 1.0)


def test_step_that_counts_although_a_member_was_lost_ends_before_the_pause() -> None:
    """It has the number of the view before, and ends at 4. The change takes until 6."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3)
    pauses.note_change(_ALL, _WITHOUT_1, 2.0)
    _train(pauses, 4)
    assert found == []
    _train(pauses, 7, number=1)
    assert [event.pause_s for event in found] == [2.0]


def test_changes_without_a_step_in_between_are_one_event() -> None:
    """Worker 1 is lost, starts again, is lost again, and the third one stays."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3)
    again = View(2, (0, 1, 2), incarnations=(5, 8, 7))
    last = View(4, (0, 1, 2), incarnations=(5, 9, 7))
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    pauses.note_change(_WITHOUT_1, again, 0.25)
    pauses.note_change(again, last, 0.25)
    _train(pauses, 9, number=4)
    (event,) = found
    assert _lost_and_joined(event) == (["worker 1"] * 2, ["worker 1"] * 2, 3)
    assert (event.change_s, event.pause_s) == (1.0, 5.0)


def test_time_of_a_pause_is_no_time_of_a_step() -> None:
    pauses, found = _pauses()
    _train(pauses, 1, 2)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 100, 101, number=1)
    pauses.note_change(_WITHOUT_1, View(2, (0, 1, 2), incarnations=(5, 8, 7)), 0.5)
    _train(pauses, 104, number=2)
    assert [event.pause_s for event in found] == [97.0, 2.0]
    assert [event.step_s for event in found] == [1.0, 1.0]
    assert _lost_and_joined(found[1]) == ([], ["worker 1"], 3)


def test_pause_without_steps_before_is_unknown() -> None:
    pauses, found = _pauses()
    pauses.begin(_ALL)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 7, number=1)
    assert [_lost_and_joined(event) for event in found] == [([], [], 3), (["worker 1"], [], 2)]
    assert [(event.pause_s, event.step_s) for event in found] == [(None, None)] * 2


def test_loss_before_the_first_step_of_a_process_that_joins_is_recorded_once() -> None:
    pauses, found = _pauses()
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    pauses.begin(_WITHOUT_1)
    assert found == []
    _train(pauses, 7, number=1)
    assert [_lost_and_joined(event) for event in found] == [(["worker 1"], [], 2)]


def test_members_of_a_group_record_a_loss_and_a_join(make_cluster, monkeypatch) -> None:
    """Each member that stays records both; the one that joins records that it trains."""
    monkeypatch.setattr(group_module, "time", ticking())
    cluster = make_cluster(3)
    groups = cluster.started(3)
    found: dict[int, list[MembersEvent]] = {}

    def record(group: Any) -> None:
        events: Any = _Events()
        found[group.member] = events.found
        group._pauses._find_events = lambda: events

    for group in groups:
        record(group)
    log_sizes = lambda log: [len(step.members) for step in log]  # noqa: E731

    def is_over(log: list[Any]) -> bool:
        return 2 in log_sizes(log) and log_sizes(log)[-3:] == [3] * 3

    trainings = [Training(group, is_over) for group in groups]
    trainings[0].until(lambda log: len(log) > 3)
    trainings.pop(1).group.close()
    trainings[0].until(lambda log: 2 in log_sizes(log))
    again = cluster.member(1)
    record(again)
    trainings.append(Training(again, is_over))
    for training in trainings:
        training.join()
    for member in (0, 2):
        lost, joined = found[member]
        assert _lost_and_joined(lost) == (["worker 1"], [], 2)
        assert _lost_and_joined(joined) == ([], ["worker 1"], 3)
        assert lost.monotonic_s < joined.monotonic_s
        for event in (lost, joined):
            assert event.pause_s is not None
            assert event.change_s > 0
    assert [_lost_and_joined(event) for event in found[1]] == [([], [], 3)]
