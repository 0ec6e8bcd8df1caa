"""Ring all-reduce against NumPy, and the messages it sends."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import ring_sum, split_into_shards
from tests.unit.devices.collectives.axes import AXES, on_axis


@pytest.mark.parametrize("count", AXES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (12,), (3, 5)])
def test_every_replica_gets_the_sum(count, shape) -> None:
    parts = np.random.default_rng(count).integers(-9, 9, (count, *shape)).astype(np.float32)
    sums = on_axis(AXES[count], lambda part: ring_sum(part, AXES[count]), parts)
    np.testing.assert_array_equal(sums, np.broadcast_to(parts.sum(axis=0), parts.shape))


@pytest.mark.parametrize(("size", "count"), [(7, 3), (6, 3), (2, 4), (0, 2), (1, 1)])
def test_shards_are_equal_in_order_and_padded_with_zeros(size, count) -> None:
    values = np.arange(1.0, size + 1)
    shards = np.asarray(split_into_shards(jnp.asarray(values), count))
    assert shards.shape == (count, -(-size // count))
    np.testing.assert_array_equal(shards.ravel()[:size], values)
    assert not shards.ravel()[size:].any()
