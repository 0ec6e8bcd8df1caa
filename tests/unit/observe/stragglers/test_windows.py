"""Alignment of the lines of several workers."""

from __future__ import annotations

import math

import pytest

from stratagem.observe.stragglers.windows import MIN_STEPS, windows_of
from tests.unit.observe.stragglers.simulation import Group, step_event


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
    assert one["worker 0"].received_s is None


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


def test_times_of_receiving_are_per_step() -> None:
    lines = [
        (f"worker {rank}", 1.0, step_event(10, 10, 1.0, 0.5, received_s={"worker 9": 0.2}))
        for rank in range(2)
    ]
    (window,) = windows_of(lines, window_s=math.inf)
    assert window.bins[0]["worker 0"].received_s == pytest.approx({"worker 9": 0.02})


def test_lines_of_steps_that_may_leave_workers_out_are_in_no_window() -> None:
    group = Group(num_workers=3, slow=1, cause="compute", extra_s=0.5, waits_for_all=False)
    assert windows_of(group.lines()) == []
