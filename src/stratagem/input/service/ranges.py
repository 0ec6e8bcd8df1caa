"""Sets of numbers as half-open ranges, which stay small when numbers are added in order."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

# The range of all numbers that occur.
EVERY_NUMBER = (0, 2**53)


class NumberRanges:
    """A set of numbers from 0 on. `as_json` returns sorted, disjoint ranges [start, stop)."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add_range(start, stop)

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberRanges) and self.as_json() == other.as_json()

    def __hash__(self) -> int:
        raise TypeError("NumberRanges can change")

    def __repr__(self) -> str:
        return f"NumberRanges({self.as_json()})"

    def add(self, number: int) -> None:
        """Adds one number."""
        self.add_range(number, number + 1)

    def add_range(self, start: int, stop: int) -> None:
        """Adds the numbers [start, stop)."""
        if start >= stop:
            return
        # All ranges that overlap or touch the new one become one with it.
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def update(self, other: NumberRanges) -> None:
        """Adds all numbers of another set."""
        for start, stop in zip(other._starts, other._stops, strict=True):
            self.add_range(start, stop)

    @property
    def is_everything(self) -> bool:
        """True if no number is missing."""
        return self.first_missing() >= EVERY_NUMBER[1]

    def first_missing(self) -> int:
        """Returns the lowest number that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def as_json(self) -> list[list[int]]:
        """Returns the ranges as lists."""
        return [[start, stop] for start, stop in zip(self._starts, self._stops, strict=True)]
