"""Late workers of a window, compared with delays that were put in."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.observe.events import ProcessEvents
from stratagem.observe.stragglers import (
    MIN_STEPS,
    Cause,
    SettledLines,
    Straggler,
    Window,
    WorkerSummary,
    WorkerTimes,
    find_stragglers,
    summaries_of,
    windows_of,
)
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    failure,
    first_step,
    members,
    process,
    restored,
    steps,
)
from tests.unit.observe.stragglers.simulation import Group, step_event


def window_of(group: Group) -> Window:
    (window,) = windows_of(group.lines(), window_s=math.inf)
    return window


def exact(busy_s: dict[str, float], num_bins: int = 10, **more) -> Window:
    step_s = max(busy_s.values())
    one = {
        task: WorkerTimes(step_s=step_s, busy_s=time_s, **more) for task, time_s in busy_s.items()
    }
    return Window(bins=(one,) * num_bins, sizes=(1,) * num_bins)


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(2, 9),
    noise=st.floats(0, 0.1),
    compute_s=st.sampled_from([0.004, 0.2, 1.5]),
    measures=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equal_workers_are_not_late(num_workers, noise, compute_s, measures, seed) -> None:
    group = Group(
        num_workers=num_workers,
        num_steps=60,
        compute_s=compute_s,
        noise=noise,
        measures_transfers=measures,
        seed=seed,
    )
    assert find_stragglers(window_of(group)) == ()


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(3, 9),
    noise=st.floats(0, 0.1),
    cause=st.sampled_from(["input", "compute"]),
    extra_s=st.floats(0.1, 2.0),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_late_worker_and_its_cause_are_found(
    num_workers, noise, cause, extra_s, seed, data
) -> None:
    slow = data.draw(st.integers(0, num_workers - 1))
    group = Group(
        num_workers=num_workers,
        num_steps=60,
        noise=noise,
        slow=slow,
        cause=cause,
        extra_s=extra_s,
        seed=seed,
    )
    (found,) = find_stragglers(window_of(group))
    assert (found.task, found.cause.value) == (f"worker {slow}", cause)
    # The others are as far behind each other as before, so they wait for all of the extra time.
    assert found.late_s == pytest.approx(extra_s, abs=0.05 + 0.1 * extra_s)


@pytest.mark.parametrize("cause", ["input", "compute"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_late_worker_is_found_where_transfers_are_not_measured(cause, num_workers) -> None:
    group = Group(
        num_workers=num_workers, slow=1, cause=cause, extra_s=0.1, measures_transfers=False
    )
    (found,) = find_stragglers(window_of(group))
    assert (found.task, found.cause.value) == ("worker 1", cause)


def test_host_that_waits_for_its_own_programs_holds_up_nobody() -> None:
    """Its reading takes long, but less than the program beside it."""
    quick = WorkerTimes(step_s=0.5, busy_s=0.01, idle_s=0.49, input_s=0.0)
    reading = WorkerTimes(step_s=0.5, busy_s=0.4, idle_s=0.1, input_s=0.4)
    one = {"worker 0": quick, "worker 1": quick, "worker 2": reading}
    assert find_stragglers(Window(bins=(one,) * 10, sizes=(1,) * 10)) == ()
    late = dataclasses.replace(reading, busy_s=0.5, idle_s=0.0)
    one["worker 2"] = late
    (found,) = find_stragglers(Window(bins=(one,) * 10, sizes=(1,) * 10))
    assert found.task == "worker 2"


def test_unmeasured_input_has_no_cause() -> None:
    (found,) = find_stragglers(exact({"worker 0": 0.1, "worker 1": 0.3}))
    assert (found.task, found.cause) == ("worker 1", Cause.UNKNOWN)
    assert found.late_s == pytest.approx(0.2)


def test_each_of_several_late_workers_is_measured_against_the_others() -> None:
    busy_s = {"worker 0": 1.0, "worker 1": 1.0, "worker 2": 1.5, "worker 3": 2.0}
    found = find_stragglers(exact(busy_s, input_s=0.0))
    assert [(one.task, one.late_s) for one in found] == [("worker 3", 1.0), ("worker 2", 0.5)]
    assert {one.step_s for one in found} == {2.0}


def test_few_steps_tell_nothing() -> None:
    busy_s = {"worker 0": 0.1, "worker 1": 0.5}
    assert find_stragglers(exact(busy_s, MIN_STEPS - 1)) == ()
    assert find_stragglers(exact(busy_s, MIN_STEPS))
    assert find_stragglers(Window(bins=(), sizes=())) == ()


def test_single_pause_makes_nobody_late() -> None:
    one = {f"worker {rank}": WorkerTimes(step_s=0.2, busy_s=0.2) for rank in range(3)}
    waiting = {task: WorkerTimes(step_s=5.0, busy_s=0.2) for task in one}
    pause = waiting | {"worker 1": WorkerTimes(step_s=5.0, busy_s=5.0)}
    assert find_stragglers(Window(bins=(one,) * 9 + (pause,), sizes=(5,) * 10)) == ()


def test_independent_workers_do_not_wait() -> None:
    """As those of parameter servers, whose steps take as long as each of them needs."""
    one = {
        f"worker {rank}": WorkerTimes(step_s=time_s, busy_s=time_s)
        for rank, time_s in enumerate((0.2, 0.2, 0.6))
    }
    assert find_stragglers(Window(bins=(one,) * 10, sizes=(5,) * 10)) == ()
    for task, times in one.items():
        one[task] = dataclasses.replace(times, step_s=0.6)
    (found,) = find_stragglers(Window(bins=(one,) * 10, sizes=(5,) * 10))
    assert found.task == "worker 2"


def test_worker_that_came_late_is_left_out() -> None:
    one = {f"worker {rank}": WorkerTimes(step_s=0.2, busy_s=0.2) for rank in range(3)}
    more = one | {"worker 3": WorkerTimes(step_s=0.2, busy_s=0.9)}
    assert find_stragglers(Window(bins=(one,) * 6 + (more,) * 4, sizes=(5,) * 10)) == ()


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.INPUT, "is slow in input:"),
        (Cause.COMPUTE, "is slow in computing:"),
        (Cause.UNKNOWN, "is slow: the others wait 1.5 s of each 2.0 s step"),
    ],
)
def test_sentence_names_the_cause(cause, words) -> None:
    assert words in Straggler(task="worker 1", cause=cause, late_s=1.5, step_s=2.0).text


# Alignment of the lines of several workers.


def test_lines_are_averaged_over_the_same_steps() -> None:
    """Worker 1 writes steps 1 to 4 and 5 to 10; worker 0 steps 1 to 10 in one line."""
    lines = [
        ("worker 1", 1.0, step_event(4, 4, 4.0, 2.0, input_s=0.4)),
        ("worker 1", 2.0, step_event(10, 6, 12.0, 6.0, input_s=1.2)),
        ("worker 0", 2.5, step_event(10, 10, 16.0, 8.0, input_s=0.0)),
    ]
    (window,) = windows_of(lines, window_s=math.inf)
    assert window.sizes == (10,)
    (one,) = window.bins
    assert one["worker 1"].step_s == pytest.approx(1.6)
    assert one["worker 1"].busy_s == pytest.approx(0.8)
    assert one["worker 1"].input_s == pytest.approx(0.16)
    assert one["worker 0"].busy_s == pytest.approx(0.8)


def test_all_steps_are_in_windows_of_a_length() -> None:
    group = Group(num_workers=3, num_steps=300, noise=0.0)  # 0.25 s each
    windows = windows_of(group.lines())
    assert sum(window.num_steps for window in windows) == 300
    assert len(windows) == pytest.approx(300 * 0.25 / 10, abs=2)
    assert all(len(one) == 3 for window in windows for one in window.bins)


def test_long_steps_are_in_windows_with_enough_of_them() -> None:
    windows = windows_of(Group(num_workers=2, num_steps=23, compute_s=30.0).lines())
    assert [window.num_steps for window in windows[:-1]] == [MIN_STEPS] * (len(windows) - 1)


def test_steps_that_run_again_begin_a_window() -> None:
    def lines(begin_s: float, waited_s: float) -> list:
        return [
            (f"worker {rank}", begin_s + rank, step_event(20, 20, 4.0, waited_s))
            for rank in range(2)
        ]

    first, second = windows_of([*lines(0.0, 2.0), *lines(50.0, 3.0)], window_s=math.inf)
    assert first.bins[0]["worker 0"].busy_s == pytest.approx(0.1)
    assert second.bins[0]["worker 0"].busy_s == pytest.approx(0.05)


def test_worker_that_ends_is_in_no_later_bin() -> None:
    lines = [
        *((f"worker {rank}", 1.0, step_event(10, 10, 1.0, 0.5)) for rank in range(3)),
        *((f"worker {rank}", 2.0, step_event(20, 10, 1.0, 0.5)) for rank in (0, 2)),
    ]
    (window,) = windows_of(lines, window_s=math.inf)
    assert [sorted(one) for one in window.bins] == [
        ["worker 0", "worker 1", "worker 2"],
        ["worker 0", "worker 2"],
    ]


def test_gap_in_the_steps_of_a_worker_is_covered_by_none() -> None:
    lines = [
        *((f"worker {rank}", 1.0, step_event(10, 10, 1.0, 0.5)) for rank in range(2)),
        ("worker 0", 2.0, step_event(20, 10, 1.0, 0.5)),
        *((f"worker {rank}", 3.0, step_event(30, 10, 1.0, 0.5)) for rank in range(2)),
    ]
    (window,) = windows_of(lines, window_s=math.inf)
    assert window.sizes == (10, 10)


def test_lines_without_waits_and_of_one_worker_give_nothing() -> None:
    assert windows_of([("worker 0", 1.0, step_event(10, 10, 1.0, 0.5))]) == []
    unmeasured = [(f"worker {rank}", 1.0, step_event(10, 10, 1.0, None)) for rank in range(2)]
    assert windows_of(unmeasured) == []
    assert windows_of([]) == []


def test_input_is_no_longer_than_the_own_work() -> None:
    lines = [
        (f"worker {rank}", 1.0, step_event(10, 10, 1.0, 0.5, input_s=9.0)) for rank in range(2)
    ]
    (window,) = windows_of(lines, window_s=math.inf)
    assert window.bins[0]["worker 1"].input_s == pytest.approx(0.05)


# Times of the workers over a run, compared with what was put in.


def summaries_in(group: Group) -> tuple[WorkerSummary, ...]:
    lines = group.lines()
    return summaries_of(windows_of(lines), max(at_s for _, at_s, _ in lines))


@settings(max_examples=8, deadline=None)
@given(num_workers=st.integers(2, 8), noise=st.floats(0, 0.25), seed=st.integers(0, 10**6))
def test_no_equal_worker_is_slow_in_a_long_run(num_workers, noise, seed) -> None:
    found = summaries_in(Group(num_workers=num_workers, num_steps=800, noise=noise, seed=seed))
    assert len(found) == num_workers
    assert {one.slow for one in found} == {None}


@settings(max_examples=12, deadline=None)
@given(
    cause=st.sampled_from(["input", "compute"]),
    seed=st.integers(0, 10**6),
    begin=st.integers(0, 400),
    length=st.integers(200, 400),
)
def test_worker_that_is_slow_for_a_while_is_named(cause, seed, begin, length) -> None:
    group = Group(
        num_workers=4,
        num_steps=800,
        slow=2,
        cause=cause,
        extra_s=0.3,
        begin=begin,
        end=begin + length,
        seed=seed,
    )
    (one,) = (one for one in summaries_in(group) if one.slow is not None)
    assert one.slow is not None
    assert (one.task, one.slow.cause.value) == ("worker 2", cause)
    assert one.slow.late_s == pytest.approx(0.3, abs=0.04)
    assert one.slow.step_s == pytest.approx(0.56, abs=0.06)
    # The windows at its begin and end are half slow, and count in full or not at all.
    assert one.num_late_steps == pytest.approx(length, rel=0.35)
    assert one.num_steps == 800


def test_times_of_a_step_are_medians() -> None:
    worker = summaries_in(Group(num_workers=3, noise=0.0))[1]
    assert worker.task == "worker 1"
    assert (worker.input_s, worker.work_s) == (pytest.approx(0.02), pytest.approx(0.2))
    assert (worker.peers_s, worker.transfer_s) == (pytest.approx(0), pytest.approx(0.03))
    assert worker.slow is None


def test_unmeasured_times_are_unknown() -> None:
    found = summaries_in(
        Group(num_workers=2, slow=1, cause="input", extra_s=0.2, measures_transfers=False)
    )
    assert [worker.transfer_s for worker in found] == [None, None]
    assert [worker.slow and worker.slow.cause for worker in found] == [None, Cause.INPUT]


def test_run_of_one_worker_has_no_summaries() -> None:
    assert summaries_of([], 10.0) == ()
    alone = [line for line in Group(num_workers=2).lines() if line[0] == "worker 1"]
    assert summaries_of(windows_of(alone), 10.0) == ()


# Lines of steps that count.


def test_first_lines_are_left_out() -> None:
    news = process(
        *("worker 1", 0, first_step(10, 1), steps(10, 11, 2, 9), restored(12, 5)),
        *(steps(13, 14, 6, 7), steps(14, 15, 8, 20), failure(16, "worker 0")),
        *(steps(17, 18, 21, 22), steps(18, 19, 23, 30), members(20, 1, 2, lost="0", pause_s=0.5)),
        *(steps(19, 20, 31, 31), steps(20, 21, 32, 41)),
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
