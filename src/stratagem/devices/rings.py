"""Ring order of the chips in a box, with adjacent chips next to each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Position = tuple[int, int, int]


def ring_of(sizes: Sequence[int]) -> list[Position]:
    """Returns every position of a box as a ring, or row by row if it has none.

    In a ring, neighbors are one step apart, as are the last and the first. At least two sides must
    be longer than 1, and all such sides even.

    Source: TF 2.21 device_assignment.py, _ring_3d.
    """
    long = [axis for axis in range(3) if sizes[axis] > 1]
    is_odd = any(sizes[axis] % 2 for axis in long)
    if len(long) < 2 or is_odd:
        rows = itertools.product(*(range(sizes[axis]) for axis in (2, 1, 0)))
        return [(x, y, z) for z, y, x in rows]
    if len(long) == 2:
        first, second = long
        return [
            _position({first: one, second: other})
            for one, other in [(0, 0), *_open_ring(sizes[first], sizes[second])]
        ]
    # Layer by layer over all but the corner, and back through the corners.
    ring: list[Position] = [(0, 0, 0)]
    for z in range(sizes[2]):
        layer = [(x, y, z) for x, y in _open_ring(sizes[0], sizes[1])]
        ring += layer if z % 2 == 0 else layer[::-1]
    return ring + [(0, 0, z) for z in range(sizes[2] - 1, 0, -1)]


def _open_ring(width: int, height: int) -> list[tuple[int, int]]:
    """Returns a zigzag ring over a rectangle of even sides, without its first corner."""
    ring: list[tuple[int, int]] = []
    for row in range(height):
        columns = range(1, width)
        ring += [(column, row) for column in (columns if row % 2 == 0 else reversed(columns))]
    return ring + [(0, row) for row in range(height - 1, 0, -1)]


def _position(along: dict[int, int]) -> Position:
    return along.get(0, 0), along.get(1, 0), along.get(2, 0)
