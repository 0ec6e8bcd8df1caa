"""Pauses while members change, against times computed by hand."""

from __future__ import annotations

from typing import Any

from stratagem.group.elastic import rounds
from stratagem.group.elastic.rounds import TrainingPauses
from stratagem.group.elastic.views import View
from stratagem.observe.run_events.records import MembersEvent
from tests.unit.group.elastic.members import Training
from tests.unit.observe.run_events.test_wait_clock import ticking

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
    return TrainingPauses(_TASKS, most=3, find_events=lambda: events), events.found


def _train(pauses: TrainingPauses, *ends_s: float, number: int = 0) -> None:
    for end_s in ends_s:
        pauses.end_step(number, end_s)


def _changes(event: MembersEvent) -> tuple[list[str], list[str], int]:
    return event.lost, event.joined, event.num_members


def test_pause_is_the_time_between_two_steps_less_a_step() -> None:
    """Steps end at 1, 2, 3.5 and 4.5: the median is 1. The next one ends 3 seconds later."""
    pauses, found = _pauses()
    _train(pauses, 1, 2, 3.5, 4.5)
    pauses.note_change(_ALL, _WITHOUT_1, 0.25)
    assert found == []
    _train(pauses, 7.5, 8.5, number=1)
    (event,) = found
    assert _changes(event) == (["worker 1"], [], 2)
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
    assert _changes(event) == (["worker 1"] * 2, ["worker 1"] * 2, 3)
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
    assert _changes(found[1]) == ([], ["worker 1"], 3)


def test_pause_without_steps_before_is_unknown() -> None:
    pauses, found = _pauses()
    pauses.begin(_ALL)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 7, number=1)
    assert [_changes(event) for event in found] == [([], [], 3), (["worker 1"], [], 2)]
    assert [(event.pause_s, event.step_s) for event in found] == [(None, None)] * 2


def test_loss_before_the_first_step_of_a_process_that_joins_is_recorded_once() -> None:
    pauses, found = _pauses()
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    pauses.begin(_WITHOUT_1)
    assert found == []
    _train(pauses, 7, number=1)
    assert [_changes(event) for event in found] == [(["worker 1"], [], 2)]


def test_without_a_folder_of_the_run_nothing_is_recorded() -> None:
    pauses = TrainingPauses(_TASKS, most=3, find_events=lambda: None)
    pauses.begin(_ALL)
    _train(pauses, 1, 2)
    pauses.note_change(_ALL, _WITHOUT_1, 0.5)
    _train(pauses, 3, number=1)


def test_members_of_a_group_record_a_loss_and_a_join(make_cluster, monkeypatch) -> None:
    """Each member that stays records both; the one that joins records that it trains."""
    monkeypatch.setattr(rounds, "time", ticking())
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
        assert _changes(lost) == (["worker 1"], [], 2)
        assert _changes(joined) == ([], ["worker 1"], 3)
        assert lost.monotonic_s < joined.monotonic_s
        for event in (lost, joined):
            assert event.pause_s is not None
            assert event.change_s > 0
    assert [_changes(event) for event in found[1]] == [([], [], 3)]
