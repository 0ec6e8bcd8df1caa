"""Exponents of costs that are known."""

from __future__ import annotations

import math

import pytest

from benchmarks.growth.exponents import MOST, exponent

SIZES = [10, 100, 1000, 10_000]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_power_is_found(power: float) -> None:
    assert exponent(SIZES, [3 * size**power for size in SIZES]) == pytest.approx(power)


def test_constant_part_does_not_hide_the_growth() -> None:
    costs = [1000 + size**2 for size in SIZES]
    assert 1.7 < exponent(SIZES, costs) < 2
    assert exponent(SIZES, [size * math.log(size) for size in SIZES]) < MOST


@pytest.mark.parametrize(("sizes", "costs"), [([1], [1.0]), ([1, 2], [1.0])])
def test_too_few_are_refused(sizes: list[int], costs: list[float]) -> None:
    with pytest.raises(ValueError, match="expected two or more of each"):
        exponent(sizes, costs)
