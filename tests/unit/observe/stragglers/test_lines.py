"""Lines of steps that count."""

from __future__ import annotations

from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.stragglers.lines import SettledLines
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    failure,
    first_step,
    members,
    process,
    restored,
    steps,
)


def test_first_lines_are_left_out() -> None:
    news = process(
        "worker 1",
        0,
        first_step(10, 1),
        steps(10, 11, 2, 9),
        restored(12, 5),
        steps(13, 14, 6, 7),
        steps(14, 15, 8, 20),
        failure(16, "worker 0"),
        steps(17, 18, 21, 22),
        steps(18, 19, 23, 30),
        members(20, 1, 2, lost="0", pause_s=0.5),
        steps(19, 20, 31, 31),
        steps(20, 21, 32, 41),
    )
    found = SettledLines().pick(news)
    assert [(task, at_s - EPOCH_S, event.step) for task, at_s, event in found] == [
        ("worker 1", 11, 9),
        ("worker 1", 15, 20),
        ("worker 1", 19, 30),
        ("worker 1", 21, 41),
    ]


def test_events_may_arrive_one_by_one() -> None:
    news = process("worker 1", 0, first_step(10, 1), steps(10, 11, 2, 9))
    lines = SettledLines()
    found = [
        line
        for event in news.events
        for line in lines.pick(ProcessEvents(start=news.start, events=(event,)))
    ]
    assert found == SettledLines().pick(news)
    assert len(found) == 1


def test_other_tasks_have_no_steps_that_count() -> None:
    news = process("evaluator 0", 0, first_step(10, 1), steps(10, 11, 2, 9))
    assert SettledLines().pick(news) == []
