"""The generator of clicks does what its docstring says."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from examples.clicks import law as law_module
from examples.clicks.law import (
    BIAS,
    EXPONENT,
    HELD_OUT,
    NUM_FACTORS,
    NUM_FIELDS,
    NUM_NUMBERS,
    SLOPES,
    ClickLaw,
    area_under_curve,
    hashed,
)

LAW = ClickLaw(num_ids=100_000, seed=3)
COUNT = 200_000


@pytest.fixture(scope="module")
def examples():
    features, labels = LAW.examples(1000, COUNT)
    return features["ids"], features["numbers"], labels


def test_hash_is_splitmix64() -> None:
    # The first two numbers of its reference implementation for the state 1234567.
    golden = 0x9E3779B97F4A7C15
    states = np.array([1234567 + golden, (1234567 + 2 * golden) % 2**64], np.uint64)
    assert law_module._mixed(states).tolist() == [6457827717110365317, 3203168211198807973]


def test_hashes_are_even_and_streams_are_independent() -> None:
    numbers = np.arange(HELD_OUT, HELD_OUT + COUNT)
    first, second, third = hashed(0, 1, numbers), hashed(0, 2, numbers), hashed(1, 1, numbers)
    counts, _ = np.histogram(first, bins=100, range=(0, 1))
    # Chi-squared of 99 degrees of freedom: below 160 but for one in 10,000.
    assert ((counts - COUNT / 100) ** 2 / (COUNT / 100)).sum() < 160
    correlations = np.corrcoef([first, second, third, np.roll(first, 1)])
    assert np.abs(correlations - np.eye(4)).max() < 5 / np.sqrt(COUNT)


def test_every_field_has_its_own_part_of_the_table(examples) -> None:
    ids, numbers, labels = examples
    assert ids.dtype == np.int32
    assert numbers.dtype == labels.dtype == np.float32
    assert ids.shape == (COUNT, NUM_FIELDS)
    assert numbers.shape == (COUNT, NUM_NUMBERS)
    assert sum(LAW.field_sizes) == LAW.num_ids
    ends = np.cumsum(LAW.field_sizes)
    for field, end in enumerate(ends):
        assert end - LAW.field_sizes[field] <= ids[:, field].min()
        assert ids[:, field].max() < end
    assert ClickLaw().num_ids >= 10_000_000
    assert sum(ClickLaw().field_sizes) == ClickLaw().num_ids


@pytest.mark.parametrize("field", [0, 3, NUM_FIELDS - 1])
def test_ids_are_as_popular_as_the_law_says(examples, field) -> None:
    size = LAW.field_sizes[field]
    begin = sum(LAW.field_sizes[:field])
    ranks = np.arange(min(30, size))

    def below(rank: np.ndarray) -> np.ndarray:
        return (1 - (rank + 1.0) ** (1 - EXPONENT)) / (1 - (size + 1.0) ** (1 - EXPONENT))

    chances = below(ranks + 1) - below(ranks)
    ids = begin + (2654435761 * ranks + 40503) % size
    assert len(set(ids)) == len(ids)
    found = np.array([(examples[0][:, field] == one).mean() for one in ids])
    deviations = np.sqrt(chances * (1 - chances) / COUNT)
    assert (np.abs(found - chances) < 5 * deviations).all()
    # Zipf's law: of ranks 1 to 20 the logarithm falls by the exponent with that of the rank.
    slope = np.polyfit(np.log(ranks[:20] + 1.5), np.log(found[:20]), 1)[0]
    assert slope == pytest.approx(-EXPONENT, abs=0.15)


def test_numbers_have_mean_0_and_variance_1(examples) -> None:
    numbers = examples[1].astype(np.float64)
    assert np.abs(numbers).max() <= np.sqrt(3) + 1e-6
    np.testing.assert_allclose(numbers.mean(0), 0, atol=5 / np.sqrt(COUNT))
    np.testing.assert_allclose(numbers.var(0), 1, atol=5 / np.sqrt(COUNT))


def test_logits_are_the_sum_over_pairs(examples) -> None:
    ids, numbers = examples[0][:20], examples[1][:20]
    bound = np.sqrt(3)
    for row, wanted in zip(range(20), LAW.logits(ids, numbers), strict=True):
        z = BIAS + sum(SLOPES[j] * float(numbers[row, j]) for j in range(NUM_NUMBERS))
        vectors = []
        for one in ids[row]:
            weight = float(hashed(LAW.seed, law_module._WEIGHT, one))
            z += (2 * weight - 1) * bound * law_module.WEIGHT_DEVIATION
            even = [
                float(hashed(LAW.seed, law_module._FACTORS + k, one)) for k in range(NUM_FACTORS)
            ]
            vectors.append((2 * np.array(even) - 1) * bound * law_module.FACTOR_DEVIATION)
        for f in range(NUM_FIELDS):
            for g in range(f + 1, NUM_FIELDS):
                z += vectors[f] @ vectors[g]
        assert wanted == pytest.approx(z, rel=1e-9)


def test_clicks_are_as_frequent_as_their_probabilities(examples) -> None:
    ids, numbers, labels = examples
    chances = LAW.probabilities(ids, numbers)
    assert set(np.unique(labels)) == {0.0, 1.0}
    edges = np.quantile(chances, np.linspace(0, 1, 21))
    for low, high in itertools.pairwise(edges):
        own = (chances >= low) & (chances < high)
        deviation = np.sqrt((chances[own] * (1 - chances[own])).sum()) / own.sum()
        assert abs(labels[own].mean() - chances[own].mean()) < 5 * deviation


def test_example_is_the_same_whoever_asks(examples) -> None:
    features, labels = LAW.examples(1500, 70)
    np.testing.assert_array_equal(features["ids"], examples[0][500:570])
    np.testing.assert_array_equal(features["numbers"], examples[1][500:570])
    np.testing.assert_array_equal(labels, examples[2][500:570])
    other, _ = dataclasses.replace(LAW, seed=4).examples(1500, 70)
    assert (other["ids"] != features["ids"]).mean() > 0.5
    assert (other["numbers"] != features["numbers"]).all()


def test_workers_share_the_batches_and_nothing_held_out_is_among_them() -> None:
    def taken(batches, count: int) -> list[bytes]:
        rows = [
            features["numbers"] for (features, _), _ in zip(batches, range(count), strict=False)
        ]
        return [row.tobytes() for row in np.concatenate(rows)]

    alone = taken(LAW.training(100), 60)
    parts = [taken(LAW.training(100, part=part, num_parts=3), 20) for part in range(3)]
    assert sorted(itertools.chain(*parts)) == sorted(alone)
    assert len(set(alone)) == 6000
    held_out = taken(LAW.held_out(1000, 4500), 10)
    assert len(held_out) == len(set(held_out)) == 4500
    assert not set(held_out) & set(alone)


def test_training_ends_before_the_held_out_part() -> None:
    last = HELD_OUT // 1000
    batches = LAW.training(1000, part=last, num_parts=2 * last)
    features, _ = next(batches)
    assert len(features["ids"]) == HELD_OUT % 1000
    assert next(batches, None) is None


def test_area_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(400) < 0.3).astype("float32")
    scores = np.round(rng.normal(size=400) + labels, 1)  # of which some are equal
    clicked, others = scores[labels == 1], scores[labels == 0]
    above = (clicked[:, None] > others).mean() + (clicked[:, None] == others).mean() / 2
    assert area_under_curve(labels, scores) == pytest.approx(above, abs=1e-12)
    assert area_under_curve(labels, scores) == pytest.approx(roc_auc_score(labels, scores))


def test_no_prediction_is_better_than_the_truth() -> None:
    count = 50_000
    features, labels = LAW.examples(HELD_OUT, count)
    ids, numbers = features["ids"], features["numbers"]
    best = LAW.best_auc(count)
    assert best == pytest.approx(roc_auc_score(labels, LAW.logits(ids, numbers)), abs=1e-9)
    # Its expected value, as the probabilities alone tell it.
    chances = np.sort(LAW.probabilities(ids, numbers))
    below = np.cumsum(1 - chances) - (1 - chances)
    expected = (chances * below).sum() / (chances.sum() * (1 - chances).sum())
    assert best == pytest.approx(expected, abs=0.01)
    without_pairs = numbers @ np.asarray(SLOPES) + (
        2 * hashed(LAW.seed, law_module._WEIGHT, ids) - 1
    ).sum(1) * (np.sqrt(3) * law_module.WEIGHT_DEVIATION)
    assert 0.7 < roc_auc_score(labels, without_pairs) < best - 0.005
