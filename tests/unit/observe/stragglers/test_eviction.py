"""The decision to end a slow worker: a table."""

from __future__ import annotations

import pytest

from stratagem.observe.stragglers.attribution import (
    Assessment,
    Cause,
    EvictionRule,
    Straggler,
    choose_eviction,
    slow_since,
    slowdown,
)

RULE = EvictionRule(factor=1.5, after_s=60.0, max_evictions=2)


def assessment(late_s: dict[int, float], num_workers: int = 4, step_s: float = 1.0) -> Assessment:
    stragglers = [
        Straggler(task=f"worker {rank}", cause=Cause.INPUT, late_s=time_s)
        for rank, time_s in late_s.items()
    ]
    return Assessment(
        stragglers=tuple(stragglers),
        step_s=step_s,
        num_steps=20,
        tasks=tuple(f"worker {rank}" for rank in range(num_workers)),
    )


def chosen(found: Assessment, *, rule: EvictionRule = RULE, slow_s: float = 60.0, num_evicted=0):
    since = slow_since({}, found, rule, 100.0)
    evicted = choose_eviction(rule, found, since, 100.0 + slow_s, num_evicted=num_evicted)
    return None if evicted is None else evicted.task


def test_worker_that_stays_slow_is_ended() -> None:
    found = assessment({2: 0.5})
    assert slowdown(found.stragglers[0], found) == pytest.approx(2.0)
    assert chosen(found) == "worker 2"


@pytest.mark.parametrize(
    ("found", "more"),
    [
        (assessment({}), {}),
        (assessment({2: 0.5}), {"slow_s": 59.0}),
        # A step is 1.25 times as long.
        (assessment({2: 0.2}), {}),
        (assessment({2: 0.5}), {"num_evicted": 2}),
        # A common cause.
        (assessment({1: 0.5, 2: 0.4}), {}),
        # Two workers are left at least, or more.
        (assessment({1: 0.8}, num_workers=2), {}),
        (
            assessment({2: 0.5}),
            {"rule": EvictionRule(factor=1.5, after_s=0, max_evictions=1, min_workers=4)},
        ),
        # The two that are left take 1.5 times as long for the same batch, which is no gain.
        (
            assessment({2: 0.3}, num_workers=3),
            {"rule": EvictionRule(factor=1.1, after_s=0, max_evictions=1)},
        ),
    ],
)
def test_worker_is_not_ended(found, more) -> None:
    assert chosen(found, **more) is None


def test_a_quarter_of_many_workers_may_be_slow_by_themselves() -> None:
    found = assessment({0: 0.4, 1: 0.6}, num_workers=8)
    assert chosen(found) == "worker 0"
    assert chosen(assessment({0: 0.4, 1: 0.6, 2: 0.5}, num_workers=8)) is None


def test_worker_that_recovers_begins_anew() -> None:
    since = slow_since({}, assessment({2: 0.5}), RULE, 100.0)
    since = slow_since(since, assessment({2: 0.5}), RULE, 110.0)
    assert since == {"worker 2": 100.0}
    since = slow_since(since, assessment({2: 0.1}), RULE, 120.0)
    assert since == {}
    assert slow_since(since, assessment({2: 0.5}), RULE, 130.0) == {"worker 2": 130.0}


def test_wait_as_long_as_the_step_is_an_endless_slowdown() -> None:
    found = assessment({1: 1.0})
    assert slowdown(found.stragglers[0], found) == float("inf")
