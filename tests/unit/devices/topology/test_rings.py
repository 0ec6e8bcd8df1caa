"""Rings through boxes of chips."""

from __future__ import annotations

import itertools

import pytest

from stratagem.devices.device_assignment import ring_of


def distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 1), (2, 4, 1), (8, 8, 1), (2, 1, 4), (1, 4, 2), (2, 2, 2), (4, 4, 8), (16, 16, 1)],
)
def test_every_chip_is_adjacent_to_the_next_and_the_last_to_the_first(sizes) -> None:
    ring = ring_of(sizes)
    assert ring[0] == (0, 0, 0)
    assert sorted(ring) == list(itertools.product(*map(range, sizes)))
    assert {distance(ring[i - 1], ring[i]) for i in range(len(ring))} == {1}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 5)])
def test_line_goes_from_end_to_end(sizes) -> None:
    assert ring_of(sizes) == sorted(itertools.product(*map(range, sizes)))


def test_box_with_an_odd_side_is_taken_row_by_row() -> None:
    assert ring_of((2, 3, 1)) == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0)]
