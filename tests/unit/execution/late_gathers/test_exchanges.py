"""Exchanges of one value: sums in shards and gathers, also by each of a replica's devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.late_gathers.weights import Sharded


def test_shards_of_sums_are_never_whole_on_a_device_of_a_replica() -> None:
    topology = Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))
    spec = PartitionSpec(None, topology.logical_axes)
    values = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)

    def step(stacked: Any) -> Any:
        return Sharded(0, spec, topology).scatter(stacked[0])

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=topology.mesh,
            in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(REPLICA_AXIS),
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )
    )
    inside = NamedSharding(topology.mesh, PartitionSpec(REPLICA_AXIS, None, "logical"))
    compiled = run.lower(jax.device_put(values, inside)).compile()
    np.testing.assert_array_equal(compiled(jax.device_put(values, inside)), values.sum(0))
    assert "all-gather" not in compiled.as_text()
    narrow = jax.device_put(values.astype(jnp.bfloat16), inside)  # XLA aborts without the spec
    np.testing.assert_array_equal(run(narrow), values.sum(0).astype(jnp.bfloat16))
