"""Ranges of numbers against Python's sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.input.service.job import EVERY_NUMBER, NumberRanges

_RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def _numbers(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}


@given(_RANGES, _RANGES)
def test_same_numbers_as_a_set(ranges, others) -> None:
    found, expected = NumberRanges(ranges), _numbers(ranges)
    assert list(found) == sorted(expected)
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    assert [number for number in range(32) if number in found] == sorted(expected)
    assert found.first_missing() == min(set(range(40)) - expected)
    found.update(NumberRanges(others))
    assert list(found) == sorted(expected | _numbers(others))


@given(_RANGES)
def test_json_is_sorted_disjoint_and_read_again(ranges) -> None:
    found = NumberRanges(ranges)
    as_json = found.as_json()
    flat = [end for one in as_json for end in one]
    assert flat == sorted(set(flat))  # so no two ranges touch
    assert NumberRanges(as_json) == found


@given(st.permutations(range(20)))
def test_numbers_added_in_any_order_become_one_range(order) -> None:
    found = NumberRanges()
    for number in order:
        found.add(number)
    assert found.as_json() == [[0, 20]]
    assert not found.is_everything
    assert NumberRanges([EVERY_NUMBER]).is_everything


def test_text_and_hash() -> None:
    assert repr(NumberRanges([(1, 3)])) == "NumberRanges([[1, 3]])"
    with pytest.raises(TypeError, match="can change"):
        hash(NumberRanges())
