"""Late workers of a window, compared with delays that were put in."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.observe.stragglers.attribution import Cause, find_stragglers, sentence
from stratagem.observe.stragglers.windows import MIN_STEPS, Window, WorkerTimes, windows_of
from tests.unit.observe.stragglers.simulation import Group


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
    assert find_stragglers(window_of(group)).stragglers == ()


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(3, 9),
    noise=st.floats(0, 0.1),
    cause=st.sampled_from(["input", "compute", "link"]),
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
    (found,) = find_stragglers(window_of(group)).stragglers
    assert (found.task, found.cause.value) == (f"worker {slow}", cause)
    # The others are as far behind each other as before, so they wait for all of the extra time.
    assert found.late_s == pytest.approx(extra_s, abs=0.05 + 0.1 * extra_s)


@pytest.mark.parametrize("cause", ["input", "compute"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_late_worker_is_found_where_transfers_are_not_measured(cause, num_workers) -> None:
    group = Group(
        num_workers=num_workers, slow=1, cause=cause, extra_s=0.1, measures_transfers=False
    )
    (found,) = find_stragglers(window_of(group)).stragglers
    assert (found.task, found.cause.value) == ("worker 1", cause)


def test_link_of_two_workers_belongs_to_neither() -> None:
    group = Group(num_workers=2, slow=1, cause="link", extra_s=1.0)
    assert find_stragglers(window_of(group)).stragglers == ()


def test_link_that_is_slow_for_all_belongs_to_none() -> None:
    assert find_stragglers(window_of(Group(num_workers=4, transfer_s=2.0))).stragglers == ()


def test_host_that_waits_for_its_own_programs_holds_up_nobody() -> None:
    """Its reading takes long, but less than the program beside it."""
    quick = WorkerTimes(step_s=0.5, busy_s=0.01, idle_s=0.49, input_s=0.0)
    reading = WorkerTimes(step_s=0.5, busy_s=0.4, idle_s=0.1, input_s=0.4)
    one = {"worker 0": quick, "worker 1": quick, "worker 2": reading}
    assert find_stragglers(Window(bins=(one,) * 10, sizes=(1,) * 10)).stragglers == ()
    late = dataclasses.replace(reading, busy_s=0.5, idle_s=0.0)
    one["worker 2"] = late
    (found,) = find_stragglers(Window(bins=(one,) * 10, sizes=(1,) * 10)).stragglers
    assert found.task == "worker 2"


def test_unmeasured_input_has_no_cause() -> None:
    (found,) = find_stragglers(exact({"worker 0": 0.1, "worker 1": 0.3})).stragglers
    assert (found.task, found.cause) == ("worker 1", Cause.UNKNOWN)
    assert found.late_s == pytest.approx(0.2)


def test_wait_for_several_workers_is_divided_and_counted_once() -> None:
    """Two wait 0.5 s for both and 0.5 s for worker 3 alone, for which worker 2 waits, too."""
    busy_s = {"worker 0": 1.0, "worker 1": 1.0, "worker 2": 1.5, "worker 3": 2.0}
    assessment = find_stragglers(exact(busy_s, input_s=0.0))
    late_s = {one.task: one.late_s for one in assessment.stragglers}
    assert late_s == pytest.approx({"worker 2": 0.5 / 3, "worker 3": 2.0 / 3})
    waits_s = [2.0 - time_s for time_s in busy_s.values()]
    assert sum(late_s.values()) * 3 == pytest.approx(sum(waits_s))
    assert [one.task for one in assessment.stragglers] == ["worker 3", "worker 2"]


def test_few_steps_tell_nothing() -> None:
    busy_s = {"worker 0": 0.1, "worker 1": 0.5}
    assert find_stragglers(exact(busy_s, MIN_STEPS - 1)).stragglers == ()
    assert find_stragglers(exact(busy_s, MIN_STEPS)).stragglers
    assert find_stragglers(Window(bins=(), sizes=())).stragglers == ()


def test_single_pause_makes_nobody_late() -> None:
    one = {f"worker {rank}": WorkerTimes(step_s=0.2, busy_s=0.2) for rank in range(3)}
    waiting = {task: WorkerTimes(step_s=5.0, busy_s=0.2) for task in one}
    pause = waiting | {"worker 1": WorkerTimes(step_s=5.0, busy_s=5.0)}
    assert find_stragglers(Window(bins=(one,) * 9 + (pause,), sizes=(5,) * 10)).stragglers == ()


def test_independent_workers_do_not_wait() -> None:
    """As those of parameter servers, whose steps take as long as each of them needs."""
    one = {
        f"worker {rank}": WorkerTimes(step_s=time_s, busy_s=time_s)
        for rank, time_s in enumerate((0.2, 0.2, 0.6))
    }
    assert find_stragglers(Window(bins=(one,) * 10, sizes=(5,) * 10)).stragglers == ()
    for task, times in one.items():
        one[task] = dataclasses.replace(times, step_s=0.6)
    (found,) = find_stragglers(Window(bins=(one,) * 10, sizes=(5,) * 10)).stragglers
    assert found.task == "worker 2"


def test_worker_that_came_late_is_left_out() -> None:
    one = {f"worker {rank}": WorkerTimes(step_s=0.2, busy_s=0.2) for rank in range(3)}
    more = one | {"worker 3": WorkerTimes(step_s=0.2, busy_s=0.9)}
    assessment = find_stragglers(Window(bins=(one,) * 6 + (more,) * 4, sizes=(5,) * 10))
    assert assessment.stragglers == ()
    assert "worker 3" not in assessment.tasks


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.INPUT, "is slow in input:"),
        (Cause.COMPUTE, "is slow in computing:"),
        (Cause.LINK, "is slow by its link:"),
        (Cause.UNKNOWN, "is slow: the others wait 1.5 s of each 2.0 s step"),
    ],
)
def test_sentence_names_the_cause(cause, words) -> None:
    assert words in sentence("worker 1", cause, 1.5, 2.0)
