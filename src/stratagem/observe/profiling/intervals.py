"""Sets of points in time, as sorted lists of intervals that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals in any order; empty ones disappear."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the points in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the points of the first set that are not in the second."""
    if not first:
        return []
    edges = [first[0][0], *(edge for one in second for edge in one), first[-1][1]]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return intersect(first, gaps)


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the points inside a window."""
    return intersect(intervals, [window])


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of a set."""
    return sum(end - begin for begin, end in intervals)
