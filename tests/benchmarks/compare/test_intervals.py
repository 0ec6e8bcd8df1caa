"""Intervals: their coverage on known distributions, and verdicts at a bound."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.compare.intervals import Interval, Verdict, bootstrap, noise_of


@pytest.mark.parametrize("between_starts", [0.0, 0.05])
def test_interval_contains_the_true_ratio(between_starts: float) -> None:
    generator = np.random.default_rng(3)
    num_hits = 0
    for seed in range(40):
        starts = [
            1.1 * (1 + between_starts * generator.normal()) * (1 + 0.03 * generator.normal(size=7))
            for _ in range(10)
        ]
        interval = bootstrap([list(start) for start in starts], seed)
        num_hits += interval.low <= 1.1 <= interval.high
    assert num_hits >= 34  # 95% promised; a bootstrap of ten starts is a little narrow


def test_rounds_of_one_start_count_less_than_starts() -> None:
    luck = np.random.default_rng(0).normal(1.0, 0.1, size=6)
    many_rounds = bootstrap([[ratio] * 50 for ratio in luck])
    assert many_rounds.high - many_rounds.low > 0.05


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.97, 1.02, Verdict.HELD),
        (0.90, 0.94, Verdict.BROKEN),
        (0.90, 1.10, Verdict.UNDECIDED),
        (0.95, 0.95, Verdict.HELD),
    ],
)
def test_verdict(low: float, high: float, verdict: Verdict) -> None:
    assert Interval(low, low, high).verdict(0.05) is verdict


def test_noise_is_relative() -> None:
    assert noise_of([[1.0, 1.0], [1.0]]) == 0.0
    assert noise_of([[90.0, 100.0], [110.0]]) == pytest.approx(0.1)


def test_starts_may_have_different_numbers_of_rounds() -> None:
    assert bootstrap([[1.0], [2.0, 2.0, 2.0]]) == Interval(2.0, 1.0, 2.0)
    assert bootstrap([[3.0]]) == Interval(3.0, 3.0, 3.0)
