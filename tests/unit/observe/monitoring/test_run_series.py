"""Series of a run, beside values computed by hand."""

from __future__ import annotations

import math

import pytest

from stratagem.observe.goodput.account import account_for
from stratagem.observe.monitoring.run_series import NUM_COLUMNS, series_of
from tests.unit.observe.goodput.runs import (
    end,
    first_step,
    gang_restart,
    memory,
    process,
    progress,
    run,
    save,
    steps,
    straggling,
    warning,
)


def series(events):
    account = account_for(events)
    return series_of(events, account.begin_s, account.whole_s)


def column(time_s: float, whole_s: float) -> int:
    return int(time_s / whole_s * NUM_COLUMNS)


def test_values_are_those_of_one_worker() -> None:
    values = series(straggling()).values
    assert (values["loss"].times_s, values["loss"].values) == ((20.0, 40.0), (2.0, 1.0))
    assert values["accuracy"].values == (0.5, 0.75)


def test_value_that_is_not_finite_is_a_gap() -> None:
    line = series(run(process("worker 0", 0, progress(5, 1, loss=None)))).values["loss"]
    assert math.isnan(line.values[0])


def test_speed_is_counted_in_each_column() -> None:
    """5 steps a second until second 20, then 2.5; none while the first step is compiled."""
    speed = series(straggling()).speed
    assert len(speed.values) == NUM_COLUMNS
    assert speed.values[column(5, 41)] == 0
    assert speed.values[column(15, 41)] == pytest.approx(5)
    assert speed.values[column(30, 41)] == pytest.approx(2.5)
    total = sum(speed.values) * 41 / NUM_COLUMNS
    assert total == pytest.approx(100)


def test_straggler_is_the_worker_that_does_not_wait() -> None:
    found = series(straggling()).stragglers
    assert found is not None
    assert found.tasks == ("worker 0", "worker 1")
    first, second = found.delays_s
    assert math.isnan(first[column(5, 41)])
    assert (first[column(15, 41)], second[column(15, 41)]) == (0, 0)
    assert first[column(30, 41)] == 0
    assert second[column(30, 41)] == pytest.approx(0.2)
    assert found.longest_s == pytest.approx(0.2)
    cost = series(straggling()).cost
    assert cost is not None
    (slow,) = cost.slow
    # 50 steps of a run of 41 s, in each of which the other waits for 0.2 s.
    assert (slow.task, slow.num_late_steps) == ("worker 1", 50)
    assert slow.waited_s == slow.replica_s == pytest.approx(10)
    assert slow.share == pytest.approx(10 / 41)


def test_steps_without_waits_have_no_stragglers() -> None:
    found = series(gang_restart())
    assert found.stragglers is None
    assert found.num_unmeasured == 8


def test_memory_has_a_line_per_task_and_a_gap_between_its_processes() -> None:
    events = run(
        process("worker 0", 0, memory(5, 100), end(10, 1)),
        process("worker 0", 20, memory(25, 200, 30), end(30), attempt=1),
    )
    found = series(events)
    line = found.host_memory["worker 0"]
    assert line.times_s == (5, 25, 25)
    assert (line.values[0], line.values[2]) == (100, 200)
    assert math.isnan(line.values[1])
    assert found.device_memory["worker 0"].values == (30,)


def test_checkpoint_of_several_processes_is_one() -> None:
    events = run(
        process("worker 0", 0, first_step(1, 1), *save(2, 3, 1), end(9)),
        process("worker 1", 0, first_step(1, 1), *save(2, 4, 1, failed="disk full"), end(9)),
    )
    (found,) = series(events).saves
    assert (found.at_s, found.step, found.stall_s, found.num_processes) == (4, 1, 2, 2)
    assert found.failed == "disk full"


def test_warning_of_several_processes_is_one() -> None:
    events = run(
        process("worker 0", 0, warning(7, "slow"), warning(8, "slower")),
        process("worker 1", 0, warning(6, "slow")),
    )
    found = [(row.at_s, row.tasks, row.text) for row in series(events).warnings]
    assert found == [(6, ("worker 0", "worker 1"), "slow"), (8, ("worker 0",), "slower")]


def test_median_step_leaves_out_first_steps_and_gaps() -> None:
    lines = (first_step(10, 1), steps(10, 20, 2, 101, busy=5.0), steps(20, 30, 102, 103))
    assert series(run(process("worker 0", 0, *lines))).step_s == pytest.approx(0.05)


def test_run_without_anything_has_no_series() -> None:
    found = series(run(process("worker 0", 0)))
    assert (found.values, found.speed.values, found.stragglers, found.saves) == ({}, (), None, ())
    assert found.step_s is None
