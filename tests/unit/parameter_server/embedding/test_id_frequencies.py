"""Distinct rows and rows in a cache, beside simulations and figures that were measured."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg

IdFrequencies = sg.embedding.IdFrequencies


@pytest.mark.parametrize("num_rows", [1, 10, 5000, 200_000])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.3])
def test_groups_of_ranks_sum_to_the_law(num_rows: int, exponent: float) -> None:
    weights = np.arange(1, num_rows + 1.0) ** -exponent
    chances = weights / weights.sum()
    expected = -np.expm1(300 * np.log1p(-chances[: num_rows if num_rows > 1 else 0])).sum()
    found = IdFrequencies(300, exponent=exponent)
    assert found.distinct(num_rows) == pytest.approx(expected or 1, rel=2e-3)
    bins = found.bins(num_rows)
    assert bins.widths.sum() == num_rows
    assert (bins.widths * bins.probabilities).sum() == pytest.approx(1)


def test_distinct_rows_of_counts_are_those_of_drawn_ids() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(0, 50, 400)
    drawn = random.choice(400, (500, 300), p=counts / counts.sum())
    simulated = np.mean([len(np.unique(step)) for step in drawn])
    assert IdFrequencies(300, counts=counts).distinct(500) == pytest.approx(simulated, rel=0.01)


# docs/guides/parameter_servers.md: a million rows by Zipf's law, and the share of distinct rows of
# a step that a worker's cache had, by its age in steps. The simulation read a real `RowCache`.
_MEASURED = {
    (1_000, 100_000): (694, {1: 9, 4: 20, 16: 32, 64: 45}),
    (10_000, 100_000): (5_350, {1: 12, 4: 25, 16: 42, 64: 52}),
    (10_000, 10_000): (5_350, {1: 12, 4: 19, 16: 19, 64: 19}),
    (100_000, 100_000): (37_500, {1: 16, 4: 35, 16: 36, 64: 36}),
}


@pytest.mark.parametrize(("num_ids", "cache_rows"), _MEASURED)
def test_a_cache_finds_what_was_measured(num_ids: int, cache_rows: int) -> None:
    distinct, percent = _MEASURED[num_ids, cache_rows]
    frequencies = IdFrequencies(num_ids, exponent=1.0)
    assert frequencies.distinct(10**6) == pytest.approx(distinct, rel=0.002)
    for age, wanted in percent.items():
        pulled = frequencies.pulled(10**6, max_rows=cache_rows, max_age_steps=age)
        assert 100 * (1 - pulled / frequencies.distinct(10**6)) == pytest.approx(wanted, abs=1.5)


def test_no_age_and_no_room_pull_all() -> None:
    frequencies = IdFrequencies(100, exponent=1.0)
    every = pytest.approx(frequencies.distinct(1000))
    assert frequencies.pulled(1000, max_rows=1000, max_age_steps=0) == every
    assert frequencies.pulled(1000, max_rows=0, max_age_steps=9) == every


def test_popular_rows_that_are_neighbors_are_on_one_shard() -> None:
    sorted_by_count = IdFrequencies(100, counts=np.arange(1000, 0, -1.0) ** 4)
    shares = sorted_by_count.shard_shares(1000, 4)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] > 2 * shares[1] > 0
    assert IdFrequencies(100, exponent=1.2).shard_shares(1000, 4) == pytest.approx(0.25)


@pytest.mark.parametrize("options", [{"ids_per_step": 0}, {"ids_per_step": 1, "exponent": -1.0}])
def test_numbers_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one id, and an exponent"):
        IdFrequencies(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("counts", [[], [0, 0], [[1]], [-1, 2]])
def test_counts_without_an_occurrence_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="IdFrequencies received counts of shape"):
        IdFrequencies(1, counts=counts)


def test_more_counts_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="counts of 3 ids for a table of 2 rows"):
        IdFrequencies(1, counts=[1, 2, 3]).distinct(2)
