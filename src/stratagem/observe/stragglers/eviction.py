"""The decision to end a slow worker.

A worker is ended only if the others gain by it: if it stays slow, if it alone is slow, and if those
that are left do its work in less time than they wait for it now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stratagem.observe.stragglers.attribution import Assessment, Straggler

# With two workers there is no telling which of them is as fast as it should be.
_MIN_LEFT = 2
# More than this share of all workers have a common cause: a file system, a switch, the program.
_COMMON_SHARE = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """The workers to end: those that make steps take `factor` times as long, for `after_s`.

    At most `max_evictions` are ended, and at least `min_workers` are left.
    """

    factor: float
    after_s: float
    max_evictions: int
    min_workers: int = _MIN_LEFT


def slowdown(straggler: Straggler, assessment: Assessment) -> float:
    """Returns how many times as long a step takes because of a worker."""
    without_s = assessment.step_s - straggler.late_s
    return assessment.step_s / without_s if without_s > 0 else float("inf")


def slow_since(
    before: Mapping[str, float], assessment: Assessment, rule: EvictionRule, now_s: float
) -> dict[str, float]:
    """Returns since when each worker is as slow as the rule says; one that was not begins anew."""
    return {
        one.task: before.get(one.task, now_s)
        for one in assessment.stragglers
        if slowdown(one, assessment) >= rule.factor
    }


def choose_eviction(
    rule: EvictionRule,
    assessment: Assessment,
    since_s: Mapping[str, float],
    now_s: float,
    *,
    num_evicted: int,
) -> Straggler | None:
    """Returns the worker to end, or None.

    `since_s` is of `slow_since`, with this assessment. The work of the worker is divided among the
    others, so a step of `n` workers must be longer by more than n / (n - 1).
    """
    count = len(assessment.tasks)
    if num_evicted >= rule.max_evictions or count - 1 < max(rule.min_workers, _MIN_LEFT):
        return None
    if len(assessment.stragglers) > max(1.0, _COMMON_SHARE * count):
        return None
    for straggler in assessment.stragglers:
        is_lasting = now_s - since_s.get(straggler.task, now_s) >= rule.after_s
        is_gain = slowdown(straggler, assessment) > count / (count - 1)
        if straggler.task in since_s and is_lasting and is_gain:
            return straggler
    return None
