"""Aggregation of steps into records."""

from __future__ import annotations

from stratagem.observe.run_events.wait_clock import StepWaits
from stratagem.observe.run_events.writer import NO_WAITS, StepAggregator, StepRecord


def test_first_step_is_a_line_and_the_rest_one_an_interval() -> None:
    lines = StepAggregator(1.0, 0.0)
    assert lines.add(1, 1, None, 5.0) == (StepRecord(0.0, 5.0, 1, 1, 5.0),)
    written = [lines.add(2 + n, 1, 0.1, 5.25 + n * 0.25) for n in range(7)]
    # Those between, and at 6.0 the line of all; it begins where the one before has ended.
    assert [len(one) for one in written] == [0, 0, 0, 1, 0, 0, 0]
    (line,) = written[3]
    assert (line.begin_s, line.end_s, line.step, line.num_steps) == (5.0, 6.0, 5, 4)
    assert round(line.duration_s, 6) == 0.4
    rest = lines.take()
    assert rest is not None
    assert (rest.begin_s, rest.end_s, rest.step, rest.num_steps) == (6.0, 6.75, 8, 3)
    assert lines.take() is None


def test_several_steps_of_a_call() -> None:
    lines = StepAggregator(1.0, 0.0)
    assert lines.add(50, 50, 2.0, 2.0) == (StepRecord(0.0, 2.0, 50, 50, 2.0),)
    assert lines.add(100, 50, None, 2.5) == ()
    assert lines.add(150, 50, None, 3.0) == (StepRecord(2.0, 3.0, 150, 100, 1.0),)


def test_long_pause_is_not_in_a_line() -> None:
    lines = StepAggregator(1.0, 0.0)
    lines.add(1, 1, 1.0, 1.0)
    lines.add(2, 1, 0.5, 1.5)
    assert lines.add(3, 1, 0.5, 60.0) == (
        StepRecord(1.0, 1.5, 2, 1, 0.5),
        StepRecord(59.5, 60.0, 3, 1, 0.5),
    )


def test_steps_that_do_not_follow_are_apart() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.add(7, 1, 1.0, 1.0)
    lines.add(8, 1, 1.0, 2.0)
    assert lines.add(3, 1, 1.0, 3.0) == (StepRecord(1.0, 2.0, 8, 1, 1.0),)
    assert lines.take() == StepRecord(2.0, 3.0, 3, 1, 1.0)


def test_time_of_something_else_is_in_no_line() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.add(1, 1, None, 1.0)
    lines.interrupt(4.0, is_restart=False)
    assert lines.add(2, 1, None, 5.0) == ()
    assert lines.take() == StepRecord(4.0, 5.0, 2, 1, 1.0)
    lines.interrupt(6.0, is_restart=True)
    assert lines.add(3, 1, None, 7.0) == (StepRecord(6.0, 7.0, 3, 1, 1.0),)
    # The call has begun before the failure that it has met.
    lines.interrupt(8.0, is_restart=True)
    assert lines.add(4, 1, 2.0, 9.0) == (StepRecord(7.0, 9.0, 4, 1, 2.0),)


def test_state_kept_in_memory_belongs_to_the_time_before_the_next_step() -> None:
    lines = StepAggregator(10.0, 0.0)
    lines.keep(0.25)
    assert lines.add(1, 1, 0.5, 1.0) == (StepRecord(0.0, 1.0, 1, 1, 0.5, 0.25),)
    lines.keep(0.25)
    assert lines.add(2, 1, 0.5, 2.0) == ()
    lines.keep(0.125)
    lines.keep(0.125)
    assert lines.add(3, 1, None, 3.0) == ()  # all the time but that
    assert lines.take() == StepRecord(1.0, 3.0, 3, 2, 1.25, 0.5)
    lines.keep(0.25)
    lines.interrupt(4.0, is_restart=False)
    lines.add(4, 1, None, 5.0)
    assert lines.take() == StepRecord(4.0, 5.0, 4, 1, 1.0)
    # A pause that is longer than a line is in none, with all that was in it.
    lines.keep(0.25)
    assert lines.add(5, 1, 1.0, 30.0) == (StepRecord(29.0, 30.0, 5, 1, 1.0),)


def test_interval_of_nothing_is_a_line_a_call() -> None:
    lines = StepAggregator(0.0, 0.0)
    assert [len(lines.add(step, 1, None, float(step))) for step in range(1, 5)] == [1, 1, 1, 1]


def test_waits_of_a_line_are_added_up() -> None:
    lines = StepAggregator(10.0, 0.0)
    one = StepWaits(waited_s=0.5, input_s=0.25, received_s={"worker 1": 0.125})
    lines.add(1, 1, 1.0, 1.0, one)  # a line by itself
    lines.add(2, 1, 1.0, 2.0, one)
    lines.add(3, 1, 1.0, 3.0, one)
    record = lines.take()
    assert record is not None
    assert record.waits == one.plus(one)
    event = record.event(7.0)
    assert (event.time_s, event.monotonic_s, event.step, event.num_steps) == (7.0, 3.0, 3, 2)
    assert (event.waited_s, event.input_s, event.peers_s) == (1.0, 0.5, None)
    assert event.received_s == {"worker 1": 0.25}


def test_waits_that_one_step_lacks_are_unknown() -> None:
    lines = StepAggregator(10.0, 0.0)
    for step, waits in enumerate((NO_WAITS, StepWaits(waited_s=0.5), NO_WAITS), start=1):
        lines.add(step, 1, 1.0, float(step), waits)
    record = lines.take()
    assert record is not None
    assert record.event(0.0).waited_s is None
