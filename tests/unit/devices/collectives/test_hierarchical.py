"""Hierarchical all-reduce against NumPy: with groups, and without."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import hierarchical_sum
from stratagem.devices.collectives.axis import ReplicaAxis
from tests.unit.devices.collectives.axes import on_axis

GROUPS = {
    "halves of 4": ((0, 1), (2, 3)),
    "pairs of 6": ((0, 1), (2, 3), (4, 5)),
    "every second of 6": ((0, 2, 4), (1, 3, 5)),
    "none": (),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("shape", [(), (5,), (4, 3)])
def test_every_replica_gets_the_sum(name, shape) -> None:
    count = max((max(group) + 1 for group in GROUPS[name]), default=3)
    axis = ReplicaAxis("row", count, GROUPS[name])
    parts = np.random.default_rng(count).integers(-9, 9, (count, *shape)).astype(np.float32)
    sums = on_axis(axis, lambda part: hierarchical_sum(part, axis), parts)
    np.testing.assert_array_equal(sums, np.broadcast_to(parts.sum(axis=0), parts.shape))


def test_groups_exchange_only_the_shard_of_one_replica() -> None:
    axis = ReplicaAxis("row", 6, GROUPS["every second of 6"])
    program = jax.make_jaxpr(lambda part: hierarchical_sum(part, axis), axis_env=[("row", 6)])
    sizes = {
        eqn.primitive.name: eqn.invars[0].aval.size
        for eqn in program(np.zeros(12, np.float32)).jaxpr.eqns
    }
    assert sizes["reduce_scatter"] == 12
    assert sizes["psum"] == sizes["all_gather"] == 4
