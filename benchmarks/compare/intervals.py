"""Ratio of two revisions' speeds, with an interval by bootstrap."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

__all__ = ["Interval", "Verdict", "bootstrap", "noise_of"]

_NUM_RESAMPLES = 5000
_CONFIDENCE = 0.95


class Verdict(Enum):
    """Result of a comparison with a bound."""

    HELD = "held"
    BROKEN = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """Median ratio of speeds, above 1 if the working tree is faster, and its interval.

    Args:
        ratio: median of the rounds.
        low: lower end of the interval at 95% confidence.
        high: upper end.
    """

    ratio: float
    low: float
    high: float

    def verdict(self, bound: float) -> Verdict:
        """Returns HELD if at most a part `bound` slower, BROKEN if more, else UNDECIDED."""
        if self.low >= 1 - bound:
            return Verdict.HELD
        return Verdict.BROKEN if self.high < 1 - bound else Verdict.UNDECIDED


def bootstrap(starts: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Returns the median of ratios with its interval.

    Resamples starts first, then rounds within each: rounds of one start share the luck of its
    processes, such as the pages that hold their arrays.

    Args:
        starts: ratios of each round, for each start of the processes.
        seed: of the resampling.
    """
    generator = np.random.default_rng(seed)
    sizes = np.array([len(rounds) for rounds in starts])
    ratios = np.full((len(starts), sizes.max()), np.nan)
    for start, rounds in enumerate(starts):
        ratios[start, : len(rounds)] = rounds
    # Axes: resamples, their starts, rounds of these; starts with fewer rounds end with NaN.
    chosen = generator.integers(len(starts), size=(_NUM_RESAMPLES, len(starts), 1))
    places = (generator.random((*chosen.shape[:2], sizes.max())) * sizes[chosen]).astype(int)
    samples = ratios[chosen, places]
    samples[np.arange(sizes.max()) >= sizes[chosen]] = np.nan
    # Sorted, NaN comes last. NumPy's own nanmedian of short rows is many times slower.
    rows = np.sort(samples.reshape(_NUM_RESAMPLES, -1))
    num_ratios = np.count_nonzero(~np.isnan(rows), axis=1)
    middle = np.stack([(num_ratios - 1) // 2, num_ratios // 2], axis=1)
    medians = np.take_along_axis(rows, middle, axis=1).mean(axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(float(np.nanmedian(ratios)), float(low), float(high))


def noise_of(starts: Sequence[Sequence[float]]) -> float:
    """Returns the median distance of a round's speed from the median of all, relative to it."""
    speeds = [speed for rounds in starts for speed in rounds]
    center = statistics.median(speeds)
    return statistics.median(abs(speed - center) for speed in speeds) / center
