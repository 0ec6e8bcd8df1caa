"""Types and ranges of numeric arguments."""

from __future__ import annotations

import fractions

import numpy as np
import pytest

from stratagem.estimator.number_checks import check_minimum, check_number


@pytest.mark.parametrize("value", [None, 0, -3, np.int64(7)])
def test_integers_and_none_are_taken(value) -> None:
    check_number("steps", value, is_integer=True)


@pytest.mark.parametrize("value", [None, 0, 1.5, np.float32(2), fractions.Fraction(1, 3)])
def test_real_numbers_and_none_are_taken(value) -> None:
    check_number("seconds", value, is_integer=False)


@pytest.mark.parametrize(
    ("value", "is_integer", "message"),
    [
        (1.0, True, r"steps=1\.0 is of type float\.\nExpected an integer or None"),
        (True, True, "steps=True is of type bool"),
        ("1", True, "steps='1' is of type str"),
        (False, False, r"steps=False is of type bool\.\nExpected a number or None"),
        (1j, False, "steps=1j is of type complex"),
    ],
)
def test_other_types_are_refused(value, is_integer, message) -> None:
    with pytest.raises(TypeError, match=message):
        check_number("steps", value, is_integer=is_integer)


@pytest.mark.parametrize(
    ("value", "minimum", "excluded"),
    [(None, 1, False), (-5, None, False), (1, 1, False), (0.1, 0, True), (2, 1, True)],
)
def test_values_from_the_minimum_on_are_taken(value, minimum, excluded) -> None:
    check_minimum("steps", value, minimum, excluded=excluded)


@pytest.mark.parametrize(
    ("value", "minimum", "excluded", "message"),
    [
        (0, 1, False, r"steps=0 is out of range\.\nExpected a number of at least 1"),
        (0, 0, True, r"steps=0 is out of range\.\nExpected a number above 0"),
        (-0.5, 0, False, r"steps=-0\.5 is out of range"),
    ],
)
def test_values_below_the_minimum_are_refused(value, minimum, excluded, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_minimum("steps", value, minimum, excluded=excluded)
