"""Late workers of a window, compared with delays that were put in."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.observe.stragglers import (
    MIN_STEPS,
    SettledLines,
    Straggler,
    WorkerSummary,
    WorkerTimes,
    find_stragglers,
    summaries_of,
    times_of,
)
from tests.unit.observe.lockstep_group import Group, step_event
from tests.unit.observe.runs import (
    EPOCH_S,
    at,
    failure,
    first_step,
    members,
    process,
    restored,
    steps,
)


def found_in(group: Group) -> tuple[Straggler, ...]:
    return find_stragglers(times_of(group.lines()))


def exact(busy_s: dict[str, float], num_steps: int = 10, **more) -> dict[str, WorkerTimes]:
    step_s = max(busy_s.values())
    return {
        task: WorkerTimes(num_steps=num_steps, step_s=step_s, busy_s=time_s, mean_s=step_s, **more)
        for task, time_s in busy_s.items()
    }


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
    assert found_in(group) == ()


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(3, 9),
    noise=st.floats(0, 0.1),
    cause=st.sampled_from(["input", "compute"]),
    extra_s=st.floats(0.1, 2.0),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_late_worker_is_found_with_its_cause(
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
    (found,) = found_in(group)
    assert (found.task, found.cause.value) == (f"worker {slow}", cause)
    # The others are as far behind each other as before, so they wait for all of the extra time.
    assert found.late_s == pytest.approx(extra_s, abs=0.05 + 0.1 * extra_s)


@pytest.mark.parametrize("cause", ["input", "compute"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_late_worker_is_found_where_transfers_are_not_measured(cause, num_workers) -> None:
    group = Group(
        num_workers=num_workers, slow=1, cause=cause, extra_s=0.1, measures_transfers=False
    )
    (found,) = found_in(group)
    assert (found.task, found.cause.value) == ("worker 1", cause)


def test_host_that_waits_for_its_own_programs_holds_up_nobody() -> None:
    """Its reading takes long, but less than the program beside it."""
    times = exact({"worker 0": 0.01, "worker 1": 0.01, "worker 2": 0.4}, idle_s=0.1, input_s=0.01)
    assert find_stragglers(times) == ()
    times["worker 2"] = dataclasses.replace(times["worker 2"], idle_s=0.0)
    (found,) = find_stragglers(times)
    assert found.task == "worker 2"


def test_each_of_several_late_workers_is_measured_against_the_others() -> None:
    busy_s = {"worker 0": 1.0, "worker 1": 1.0, "worker 2": 1.5, "worker 3": 2.0}
    found = find_stragglers(exact(busy_s, input_s=0.0))
    assert [(one.task, one.late_s) for one in found] == [("worker 3", 1.0), ("worker 2", 0.5)]
    assert {one.step_s for one in found} == {2.0}


def test_few_steps_tell_nothing() -> None:
    busy_s = {"worker 0": 0.1, "worker 1": 0.5}
    assert find_stragglers(exact(busy_s, MIN_STEPS - 1)) == ()
    assert find_stragglers(exact(busy_s, MIN_STEPS))
    assert find_stragglers({}) == ()


def test_excess_within_its_error_makes_nobody_late() -> None:
    busy_s = {"worker 0": 0.1, "worker 1": 0.3}
    assert find_stragglers(exact(busy_s, error_s=0.05)) == ()
    assert find_stragglers(exact(busy_s, error_s=0.04))


def test_single_pause_makes_nobody_late() -> None:
    lines = [
        (f"worker {rank}", 2.0 * number, step_event(5 * number, 5, 1.0, 0.0))
        for rank in range(3)
        for number in range(1, 10)
    ]
    pauses = [
        (f"worker {rank}", 50.0, step_event(50, 5, 25.0, 0.0 if rank == 1 else 24.0))
        for rank in range(3)
    ]
    assert find_stragglers(times_of([*lines, *pauses])) == ()


def test_independent_workers_do_not_wait() -> None:
    """As those of parameter servers, whose steps take as long as each of them needs."""
    times = exact({"worker 0": 0.2, "worker 1": 0.2, "worker 2": 0.6})
    (found,) = find_stragglers(times)
    assert found.task == "worker 2"
    own = {task: dataclasses.replace(one, step_s=one.busy_s) for task, one in times.items()}
    assert find_stragglers(own)  # by their means they are in step, as with pauses in some lines
    own = {task: dataclasses.replace(one, mean_s=one.busy_s) for task, one in own.items()}
    assert find_stragglers(own) == ()


def test_worker_that_came_late_is_left_out() -> None:
    times = exact({"worker 0": 0.2, "worker 1": 0.2, "worker 2": 0.9}, 10)
    for num_steps, expected in ((5, 0), (6, 1)):
        times["worker 2"] = dataclasses.replace(times["worker 2"], num_steps=num_steps)
        assert len(find_stragglers(times)) == expected


# Medians of the lines of each worker.


def test_times_are_medians_of_lines() -> None:
    lines = [
        ("worker 1", 1.0, step_event(4, 4, 4.0, 2.0, input_s=0.4)),
        ("worker 1", 2.0, step_event(14, 10, 20.0, 10.0, input_s=2.0)),
        ("worker 1", 3.0, step_event(15, 1, 9.0, 1.0, input_s=0.1)),
        ("worker 10", 2.5, step_event(10, 10, 16.0, 8.0)),
        ("worker 2", 2.5, step_event(10, 10, 1.0, 0.5, input_s=9.0)),  # more than its own work
        ("worker 3", 2.5, step_event(10, 10, 1.0, None)),  # without waits
    ]
    times = times_of(lines)
    assert list(times) == ["worker 1", "worker 2", "worker 10"]
    assert times["worker 1"].num_steps == 15
    assert times["worker 1"].step_s == pytest.approx(2.0)
    assert times["worker 1"].busy_s == pytest.approx(1.0)
    assert times["worker 1"].input_s == pytest.approx(0.1)
    assert times["worker 2"].input_s == pytest.approx(0.05)
    assert times["worker 10"].busy_s == pytest.approx(0.8)
    assert times["worker 10"].input_s is None


# Times of the workers over a run, compared with what was put in.


def summaries_in(group: Group) -> tuple[WorkerSummary, ...]:
    by_task: dict[str, list] = {}
    for task, at_s, event in group.lines():
        by_task.setdefault(task, []).append(dataclasses.replace(event, **at(10 + at_s)))
    processes = [process(task, 0, first_step(9, 1), *lines) for task, lines in by_task.items()]
    return summaries_of(processes, max(one.events[-1].monotonic_s for one in processes) - 10)


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
    assert (one.task, one.slow.cause.value) == ("worker 2", cause)
    assert one.slow.late_s == pytest.approx(0.3, abs=0.04)
    assert one.slow.step_s == pytest.approx(0.56, abs=0.06)
    # The windows at its begin and end are half slow, and count in full or not at all.
    assert one.num_late_steps == pytest.approx(length, rel=0.35)
    assert one.times.num_steps == 800


def test_times_of_a_step_are_medians() -> None:
    worker = summaries_in(Group(num_workers=3, noise=0.0))[1]
    assert worker.task == "worker 1"
    times = worker.times
    assert (times.input_s, times.busy_s) == (pytest.approx(0.02), pytest.approx(0.22))
    assert (times.peers_s, times.transfer_s) == (pytest.approx(0), pytest.approx(0.03))
    assert worker.slow is None


def test_run_of_one_worker_has_no_summaries() -> None:
    assert summaries_of([], 10.0) == ()
    alone = process("worker 1", 0, first_step(1, 1), steps(1, 20, 2, 60, waited=1.0))
    assert summaries_of([alone], 20.0) == ()
    assert len(summaries_of([alone, dataclasses.replace(alone, start=_start(2))], 20.0)) == 2


def _start(index: int):
    return process(f"worker {index}", 0).start


def test_windows_are_as_long_as_a_few_long_steps_take() -> None:
    """Steps of half a minute: one alone would be a pause."""
    group = Group(num_workers=3, num_steps=23, compute_s=30.0, slow=1, cause="compute", extra_s=9.0)
    (found,) = [one for one in summaries_in(group) if one.slow is not None]
    assert found.task == "worker 1"


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
