"""Decisions of policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.tables.policies import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    WithProbability,
    are_drawn,
    policy_from,
    victims,
)
from tests.unit.parameter_server.server.tables.scalar_hash import (
    GOLDEN,
    KEYS,
    MASK,
    mixed,
    seeded_key,
)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=40),
    st.integers(1, 10),
    st.booleans(),
)
def test_victims_are_the_first_in_order(rows, num_wanted, is_frequency) -> None:
    ranked = sorted(
        ((count if is_frequency else 0, seen, place), place)
        for place, (count, seen, is_evictable) in enumerate(rows)
        if is_evictable
    )
    columns = [np.array([row[at] for row in rows], np.uint32) for at in (0, 1)]
    is_evictable = np.array([row[2] for row in rows], np.bool_)
    eviction = LeastFrequent() if is_frequency else LeastRecent()
    got = victims(eviction, *columns, is_evictable, num_wanted)
    assert got.tolist() == sorted(place for _, place in ranked[:num_wanted])


def test_counts_of_four_billion_do_not_overflow() -> None:
    counts, seen = np.array([2**32 - 1, 5], np.uint32), np.array([0, 2**32 - 1], np.uint32)
    assert victims(LeastFrequent(), counts, seen, np.ones(2, np.bool_), 1).tolist() == [1]
    assert victims(LeastRecent(), counts, seen, np.ones(2, np.bool_), 1).tolist() == [0]


def test_rows_are_admitted_with_their_probability() -> None:
    policy, keys = WithProbability(0.1, seed=3), np.arange(10_000)
    shares = [are_drawn(policy, keys, version).mean() for version in range(10)]
    assert abs(np.mean(shares) - 0.1) < 6 * (0.09 / 100_000) ** 0.5
    both = are_drawn(policy, keys, 1) & are_drawn(policy, keys, 2)  # independent
    assert abs(both.mean() - 0.01) < 6 * (0.01 / 10_000) ** 0.5
    assert are_drawn(WithProbability(1.0), keys, 7).all()
    for version in (0, 1, 2**40):
        wanted = [
            (mixed((seeded_key(key, 3) + version * GOLDEN) & MASK) >> 11) / 2**53 < 0.1
            for key in KEYS
        ]
        assert are_drawn(policy, np.array(KEYS), version).tolist() == wanted


def test_policies_are_read_from_fields() -> None:
    assert policy_from(None) is None
    fields = {"kind": "AfterSightings", "sightings": 3, "max_candidates": 9}
    assert policy_from(fields) == AfterSightings(3, 9)
    assert policy_from({"kind": "NotSeenFor", "steps": 5}) == NotSeenFor(5)
    assert policy_from({"kind": "LeastFrequent"}) == LeastFrequent()
    with pytest.raises(ValueError, match="has the policy 'Random'"):
        policy_from({"kind": "Random"})


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (AfterSightings, (0,)),
        (AfterSightings, (2, 0)),
        (WithProbability, (0.0,)),
        (WithProbability, (1.5,)),
        (NotSeenFor, (0,)),
    ],
)
def test_numbers_out_of_range_are_refused(kind, numbers) -> None:
    with pytest.raises(ValueError, match="has a number out of range"):
        kind(*numbers)
