"""Save and keep policies."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.checkpoint.policies import (
    Any,
    KeepEveryHours,
    KeepLatest,
    Moment,
    RetainedCheckpoint,
    SaveEverySeconds,
    SaveEverySteps,
)

TIMES_H = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)


def moment(*, steps: int = 0, seconds: float = 0.0) -> Moment:
    return Moment(step=50 + steps, time_s=9.0 + seconds, saved_step=50, saved_time_s=9.0)


def test_saves_when_enough_steps_or_seconds_have_passed() -> None:
    assert [SaveEverySteps(3).is_due(moment(steps=n)) for n in (0, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert [SaveEverySeconds(1.5).is_due(moment(seconds=s)) for s in (0, 1.4, 1.5, 9)] == [
        False,
        False,
        True,
        True,
    ]


@given(st.integers(0, 20), st.floats(0, 20), st.integers(1, 20), st.floats(0.1, 20))
def test_any_saves_where_one_does(steps: int, seconds: float, every: int, every_s: float) -> None:
    policies = SaveEverySteps(every), SaveEverySeconds(every_s)
    now = moment(steps=steps, seconds=seconds)
    assert Any(*policies).is_due(now) == (policies[0].is_due(now) or policies[1].is_due(now))


@given(TIMES_H, st.integers(1, 40), st.floats(0.01, 50))
def test_retained_checkpoints(times_h: list[float], count: int, hours: float) -> None:
    kept = [RetainedCheckpoint(number, time_h * 3600) for number, time_h in enumerate(times_h, 1)]
    latest, spaced = KeepLatest(count).keeps(kept), KeepEveryHours(hours).keeps(kept)

    assert latest == set(range(max(len(kept) - count, 0) + 1, len(kept) + 1))
    assert 1 in spaced
    spaced_s = [one.time_s for one in kept if one.number in spaced]
    assert all(b - a >= hours * 3600 for a, b in itertools.pairwise(spaced_s))
    for one in kept:  # whatever was left out is too near to one that was kept before it
        last_s = max(s for s in spaced_s if s <= one.time_s)
        assert one.number in spaced or one.time_s - last_s < hours * 3600
    assert Any(KeepLatest(count), KeepEveryHours(hours)).keeps(kept) == latest | spaced


def test_policies_are_values() -> None:
    both = Any(KeepLatest(3), KeepEveryHours(1.0))
    assert both == Any(KeepLatest(3), KeepEveryHours(1.0))
    assert hash(both) == hash(Any(KeepLatest(3), KeepEveryHours(1.0)))
    assert both != Any(KeepLatest(3))
    assert repr(both) == "Any(KeepLatest(count=3), KeepEveryHours(hours=1.0))"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_counts_are_whole_and_positive(value) -> None:
    for policy in (SaveEverySteps, KeepLatest):
        with pytest.raises(ValueError, match="is not a valid policy") as caught:
            policy(value)
        assert "an integer, 1 or more" in str(caught.value)


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), True, "3", None])
def test_times_are_positive(value) -> None:
    for policy in (SaveEverySeconds, KeepEveryHours):
        with pytest.raises(ValueError, match="a number above 0"):
            policy(value)


@pytest.mark.parametrize("policies", [(), (KeepLatest(1), SaveEverySteps(1)), (3,)])
def test_any_takes_policies_of_one_kind(policies) -> None:
    with pytest.raises(ValueError, match="mixes kinds of policies or is empty"):
        Any(*policies)


def test_older_name_of_a_retained_checkpoint_stays() -> None:
    assert sg.checkpoint.Kept is RetainedCheckpoint
