"""Sets of intervals, compared with sets of whole numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stratagem.observe.profiling.trace import clip, intersect, length, subtract, union

_INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def _points(intervals) -> set[int]:
    return {point for begin, end in intervals for point in range(int(begin), int(end))}


@given(_INTERVALS, _INTERVALS)
def test_operations_are_those_of_sets(first, second) -> None:
    a, b = union(first), union(second)
    assert _points(a) == _points(first)
    assert length(a) == len(_points(first))
    assert _points(intersect(a, b)) == _points(first) & _points(second)
    assert _points(subtract(a, b)) == _points(first) - _points(second)
    assert _points(clip(a, (5, 20))) == _points(first) & set(range(5, 20))
    for found in (a, intersect(a, b), subtract(a, b)):  # sorted, apart and not empty
        assert all(begin < end for begin, end in found)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(found))
