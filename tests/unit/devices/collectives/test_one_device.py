"""All-reduce to one device: sums in replica order, and functions of all arrays."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import one_device_sum
from tests.unit.devices.collectives.axes import AXES, on_axis


@pytest.mark.parametrize("count", AXES)
def test_sum_is_added_in_the_order_of_the_replicas(count) -> None:
    rng = np.random.default_rng(count)
    parts = (rng.normal(size=(count, 50)) * 10.0 ** rng.integers(-4, 5, 50)).astype(np.float32)
    sums = on_axis(AXES[count], lambda part: one_device_sum(part, AXES[count]), parts)
    expected = functools.reduce(np.add, parts)
    for own in sums:
        np.testing.assert_array_equal(own, expected)


def test_function_gets_the_arrays_of_all_replicas_in_order() -> None:
    axis = AXES[3]
    parts = np.arange(6, dtype=np.float32).reshape(3, 2)

    def weighed(arrays):
        return sum(array * 10**place for place, array in enumerate(arrays))

    results = on_axis(axis, lambda part: one_device_sum(part, axis, weighed), parts)
    np.testing.assert_array_equal(results, [[420, 531]] * 3)
    constant = on_axis(axis, lambda part: one_device_sum(part, axis, lambda _: 7), parts)
    np.testing.assert_array_equal(constant, jnp.full(3, 7))
