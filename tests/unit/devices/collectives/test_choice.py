"""Selection of an algorithm by size, from times."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.devices.collectives.choice import Algorithm, Choice, choose

COMPILER, RING, ONE = Algorithm.COMPILER, Algorithm.RING, Algorithm.TO_ONE_DEVICE


def test_fastest_is_chosen_for_each_size_with_limits_between_the_sizes() -> None:
    times_s = {
        COMPILER: {4: 3.0, 64: 4.0, 1024: 4.0},
        RING: {4: 2.0, 64: 2.0, 1024: 8.0},
        ONE: {4: 1.0, 64: 4.0, 1024: 9.0},
    }
    choice = choose(times_s)
    assert choice == Choice(COMPILER, ((16, ONE), (256, RING)))
    for size, expected in [(0, ONE), (16, ONE), (17, RING), (256, RING), (257, COMPILER)]:
        assert choice.algorithm(size) is expected


@pytest.mark.parametrize(
    ("small_s", "large_s"),
    # Ring: time per message, and per megabyte.
    [(0.2, 10.0), (0.9, 2.1), (0.5, 3.0)],
)
def test_limit_is_where_times_cross(small_s: float, large_s: float) -> None:
    small, large = 2**10, 2**20
    steepness = np.log(large_s / small_s) / np.log(large / small)
    expected = small * (1.0 / small_s) ** (1 / (steepness - np.log(2.0) / np.log(large / small)))
    times_s = {COMPILER: {small: 1.0, large: 2.0}, RING: {small: small_s, large: large_s}}

    choice = choose(times_s)

    ((limit, algorithm),) = choice.limits
    assert (algorithm, choice.default) == (RING, COMPILER)
    np.testing.assert_allclose(limit, expected, atol=0.5)


@pytest.mark.parametrize(("ring_s", "expected"), [(0.94, RING), (0.96, COMPILER), (1.5, COMPILER)])
def test_compiler_stands_unless_another_is_clearly_faster(ring_s, expected) -> None:
    assert choose({COMPILER: {8: 1.0}, RING: {8: ring_s}}) == Choice(expected)


def test_no_limits_where_one_is_always_the_fastest() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 1.0, 64: 1.0}}
    assert choose(times_s) == Choice(RING)
    assert Choice().algorithm(2**40) is COMPILER


def test_arrays_come_to_one_device_only_up_to_the_largest_size_that_was_measured() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 3.0, 64: 1.9}, ONE: {4: 4.0, 64: 1.0}}
    assert choose(times_s) == Choice(COMPILER, ((16, COMPILER), (64, ONE)))
    times_s[RING][64] = 1.5
    assert choose(times_s) == Choice(RING, ((16, COMPILER), (64, ONE)))


def test_limit_is_the_lower_size_where_the_compiler_stands_though_another_is_as_fast() -> None:
    assert choose({COMPILER: {4: 1.0, 64: 2.0}, RING: {4: 0.98, 64: 1.0}}) == Choice(
        RING, ((4, COMPILER),)
    )


def test_where_memory_cannot_be_shared_the_best_of_the_others_is_used() -> None:
    shared = Algorithm.SHARED_MEMORY
    times_s = {
        COMPILER: {4: 2.0, 2**18: 2.0, 2**20: 2.0},
        ONE: {4: 1.0, 2**18: 1.5, 2**20: 3.0},
        shared: {4: 0.5, 2**18: 1.0, 2**20: 0.5},
    }
    choice = choose(times_s)
    # The smallest sums do not wait for the GIL.
    assert [choice.algorithm(size) for size in times_s[ONE]] == [ONE, shared, shared]
    del times_s[shared]
    assert choice.elsewhere == choose(times_s)
    assert choose(times_s).elsewhere is None
