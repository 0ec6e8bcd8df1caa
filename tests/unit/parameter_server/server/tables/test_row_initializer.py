"""Initial rows by key, against one number at a time in Python."""

from __future__ import annotations

import dataclasses
import statistics
import struct

import numpy as np
import pytest
from scipy import stats

from stratagem.parameter_server.server.tables.table_options import RowInitializer
from tests.unit.parameter_server.server.tables.scalar_hash import (
    GOLDEN,
    KEYS,
    MASK,
    mixed,
    seeded_key,
)

NORMAL = statistics.NormalDist()


def rounded(number: float) -> float:
    """To single precision."""
    return struct.unpack("f", struct.pack("f", number))[0]


def scalar(one: RowInitializer, key: int, column: int) -> float:
    """A column of a key's row."""
    word = mixed((seeded_key(key, one.seed) + (column // 2 + 1) * GOLDEN) & MASK)
    bits = word >> 32 if column % 2 else word & 0xFFFFFFFF
    if one.kind == "uniform":
        scaled = rounded((bits >> 8) * rounded((one.b - one.a) / 2**24))
        return rounded(scaled + rounded(one.a))
    share = (bits + 0.5) / 2**32
    if one.kind == "truncated_normal":
        low = NORMAL.cdf(-2)
        share = low + (1 - 2 * low) * share
    return rounded(one.a + one.b * NORMAL.inv_cdf(share))


def rows(one: RowInitializer, keys: list[int], width: int) -> np.ndarray:
    return one.rows(np.array(keys, np.int64), (width,), np.dtype(np.float32))


@pytest.mark.parametrize("seed", [0, 12345678901234567890])
@pytest.mark.parametrize(
    ("kind", "a", "b"), [("uniform", -0.05, 0.05), ("normal", 1, 3), ("truncated_normal", 0, 0.05)]
)
def test_rows_are_those_of_scalar_python(kind, a, b, seed) -> None:
    one = RowInitializer(kind, a, b, seed)
    wanted = [[scalar(one, key, column) for column in range(5)] for key in KEYS]
    got = rows(one, KEYS, 5)
    if kind == "uniform":
        assert got.tolist() == wanted
    else:  # two formulas of the normal distribution
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


def test_rows_do_not_depend_on_their_company_or_order() -> None:
    one = RowInitializer("normal", 0, 1, 7)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000)
    together = one.rows(keys, (20,), np.dtype(np.float32))  # in several pieces
    order = np.random.default_rng(1).permutation(5000)
    np.testing.assert_array_equal(one.rows(keys[order], (20,), together.dtype), together[order])
    np.testing.assert_array_equal(one.rows(keys[7:8], (20,), together.dtype), together[7:8])
    # More columns begin with the same ones; a row of several axes has the same numbers.
    np.testing.assert_array_equal(
        one.rows(keys, (3, 7), together.dtype).reshape(5000, 21)[:, :20], together
    )


@pytest.mark.parametrize(
    ("one", "law"),
    [
        (RowInitializer("uniform", -0.05, 0.05), stats.uniform(-0.05, 0.1)),
        (RowInitializer("normal", 1, 3), stats.norm(1, 3)),
        (RowInitializer("truncated_normal", 0, 2), stats.truncnorm(-2, 2, scale=2)),
    ],
)
def test_numbers_have_their_distribution(one, law) -> None:
    numbers = rows(one, [*range(20_000)], 10)
    assert stats.kstest(numbers.reshape(-1), law.cdf).pvalue > 1e-3
    assert abs(numbers.mean() - law.mean()) < 5 * law.std() / len(numbers.reshape(-1)) ** 0.5
    np.testing.assert_allclose(numbers.std(), law.std(), rtol=0.01)
    # Neither columns nor neighboring keys are correlated.
    centered = (numbers - law.mean()) / law.std()
    columns = centered.T @ centered / len(centered) - np.eye(10)
    assert abs(columns).max() < 6 / 20_000**0.5
    assert abs((centered[1:] * centered[:-1]).mean()) < 6 / 200_000**0.5


def test_seeds_give_different_rows() -> None:
    one = RowInitializer("uniform", 0, 1)
    other = dataclasses.replace(one, seed=1)
    both = [rows(each, [*range(1000)], 4).reshape(-1) for each in (one, other)]
    assert abs(np.corrcoef(both)[0, 1]) < 0.1


def test_constant_rows_and_other_types() -> None:
    assert rows(RowInitializer("constant", 3), [1, 2], 2).tolist() == [[3, 3], [3, 3]]
    assert rows(RowInitializer(), [], 2).shape == (0, 2)
    half = RowInitializer("uniform", 0, 1).rows(np.array([1, 2]), (4,), np.dtype(np.float16))
    assert half.dtype == np.float16
    no_axes = RowInitializer("uniform", 0, 1).rows(np.array([1, 2]), (), np.dtype(np.float32))
    assert no_axes.shape == (2,)


@pytest.mark.parametrize(("kind", "b"), [("orthogonal", 1.0), ("normal", -1.0)])
def test_other_initializers_are_refused(kind, b) -> None:
    with pytest.raises(ValueError, match="is not an initializer of a keyed table"):
        RowInitializer(kind, 0, b)


def test_fields_come_back() -> None:
    one = RowInitializer("normal", 1, 2, 3)
    assert RowInitializer.from_fields(dataclasses.asdict(one)) == one
