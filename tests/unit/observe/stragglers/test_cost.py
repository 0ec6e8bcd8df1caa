"""Cost of a slow worker over a run, compared with what was put in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.observe.stragglers.attribution import Cause, RunCost, cost_of
from stratagem.observe.stragglers.windows import windows_of
from tests.unit.observe.stragglers.simulation import Group


def cost_in(group: Group) -> RunCost:
    lines = group.lines()
    cost = cost_of(windows_of(lines), max(at_s for _, at_s, _ in lines))
    assert cost is not None
    return cost


@settings(max_examples=8, deadline=None)
@given(num_workers=st.integers(2, 8), noise=st.floats(0, 0.25), seed=st.integers(0, 10**6))
def test_equal_workers_cost_nothing_in_a_long_run(num_workers, noise, seed) -> None:
    cost = cost_in(Group(num_workers=num_workers, num_steps=800, noise=noise, seed=seed))
    assert cost.slow == ()
    assert all(worker.share == 0 for worker in cost.workers)


@settings(max_examples=12, deadline=None)
@given(
    cause=st.sampled_from(["input", "compute", "link"]),
    seed=st.integers(0, 10**6),
    begin=st.integers(0, 400),
    length=st.integers(200, 400),
)
def test_worker_that_is_slow_for_a_while_costs_that_while(cause, seed, begin, length) -> None:
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
    (slow,) = cost_in(group).slow
    assert (slow.task, slow.cause and slow.cause.value) == ("worker 2", cause)
    # The windows at its begin and end are half slow, and count in full or not at all.
    assert slow.waited_s == pytest.approx(0.3 * length, rel=0.35)
    assert slow.replica_s == pytest.approx(3 * slow.waited_s)
    assert slow.late_s == pytest.approx(0.3, abs=0.04)
    assert slow.late_step_s == pytest.approx(0.56, abs=0.06)
    assert 0 < slow.share < 1
    assert slow.num_late_steps <= slow.num_steps == 800


def test_times_of_a_step_are_means() -> None:
    worker = cost_in(Group(num_workers=3, noise=0.0)).workers[1]
    assert worker.task == "worker 1"
    assert (worker.input_s, worker.work_s) == (pytest.approx(0.02), pytest.approx(0.2))
    assert (worker.peers_s, worker.transfer_s) == (pytest.approx(0), pytest.approx(0.03))
    assert worker.step_s == pytest.approx(0.25)
    assert worker.cause is None


def test_unmeasured_times_are_unknown() -> None:
    cost = cost_in(
        Group(num_workers=2, slow=1, cause="input", extra_s=0.2, measures_transfers=False)
    )
    assert [worker.transfer_s for worker in cost.workers] == [None, None]
    assert [worker.cause for worker in cost.workers] == [None, Cause.INPUT]


def test_run_of_one_worker_has_no_cost() -> None:
    assert cost_of([], 10.0) is None
    alone = [line for line in Group(num_workers=2).lines() if line[0] == "worker 1"]
    assert cost_of(windows_of(alone), 10.0) is None


def test_most_expensive_worker_is_first() -> None:
    one = Group(num_workers=5, slow=1, cause="compute", extra_s=0.2, end=60)
    both = one.lines()
    later = Group(num_workers=5, slow=3, cause="input", extra_s=0.3, seed=1)
    both += [(task, at_s + 10**4, event) for task, at_s, event in later.lines()]
    cost = cost_of(windows_of(both), 200.0)
    assert cost is not None
    assert [worker.task for worker in cost.slow] == ["worker 3", "worker 1"]
