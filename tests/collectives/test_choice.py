"""Which algorithm for which size, from times."""

from __future__ import annotations

import pytest

from stratagem.collectives.choice import Algorithm, Choice, choose

COMPILER, RING, ONE = Algorithm.COMPILER, Algorithm.RING, Algorithm.TO_ONE_DEVICE


def test_fastest_is_chosen_for_each_size_with_limits_between_the_sizes() -> None:
    times_s = {
        COMPILER: {4: 3.0, 64: 4.0, 1024: 5.0},
        RING: {4: 2.0, 64: 2.0, 1024: 9.0},
        ONE: {4: 1.0, 64: 3.0, 1024: 9.0},
    }
    choice = choose(times_s)
    assert choice == Choice(COMPILER, ((16, ONE), (256, RING)))
    for size, expected in [(0, ONE), (16, ONE), (17, RING), (256, RING), (257, COMPILER)]:
        assert choice.algorithm(size) is expected


@pytest.mark.parametrize(("ring_s", "expected"), [(0.94, RING), (0.96, COMPILER), (1.5, COMPILER)])
def test_compiler_stands_unless_another_is_clearly_faster(ring_s, expected) -> None:
    assert choose({COMPILER: {8: 1.0}, RING: {8: ring_s}}) == Choice(expected)


def test_no_limits_where_one_is_always_the_fastest() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 1.0, 64: 1.0}}
    assert choose(times_s) == Choice(RING)
    assert Choice().algorithm(2**40) is COMPILER


def test_arrays_come_to_one_device_only_up_to_the_largest_size_that_was_measured() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 3.0, 64: 1.9}, ONE: {4: 3.0, 64: 1.0}}
    assert choose(times_s) == Choice(COMPILER, ((16, COMPILER), (64, ONE)))
    times_s[RING][64] = 1.5
    assert choose(times_s) == Choice(RING, ((16, COMPILER), (64, ONE)))
