"""What replicas hand over to be added up in parts: only sums that nobody else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.programs.sharded_program import scatter_sums
from stratagem.execution.programs.update_part import StepParts, part_step
from stratagem.variables.sharded_store import ShardedStore

MESH = Mesh(np.array(jax.devices()[:2]), (REPLICA_AXIS,))
TOPOLOGY = Topology(tuple(jax.devices()[:2]))
SHAPE = (4, 3)


def parts_of(step: Callable[..., Any]) -> StepParts:
    """Of a step that gets a weight and a batch, and returns a new weight and a result."""
    copied = PartitionSpec()
    mapped = jax.shard_map(step, mesh=MESH, in_specs=copied, out_specs=copied, check_vma=False)
    closed = jax.make_jaxpr(mapped)(jnp.ones(SHAPE), jnp.ones(SHAPE))
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    jaxpr = ClosedJaxpr(eqn.params["jaxpr"], []).jaxpr
    return part_step(jaxpr, [False, True], [True, False])


def sums(parts: StepParts) -> int:
    return sum(len(eqn.invars) for eqn in parts.replica.eqns if eqn.primitive.name == "psum")


def of_weights(parts: StepParts) -> list[ShardedStore | None]:
    """The store of each value for the update; of a weight's shape only."""
    handed = parts.replica.outvars[len(parts.replica.outvars) - parts.num_handed :]
    store = ShardedStore(TOPOLOGY)
    return [store if atom.aval.shape == SHAPE else None for atom in handed]


def test_sum_of_the_update_alone_is_handed_over_as_what_is_added_up() -> None:
    parts = parts_of(lambda weight, batch: (weight - lax.psum(batch * weight, REPLICA_AXIS), batch))
    assert sums(parts) == 1
    parts, axes = scatter_sums(parts, of_weights(parts), TOPOLOGY)
    assert axes == [0]
    assert sums(parts) == 0
    (product,) = [eqn.outvars[0] for eqn in parts.replica.eqns if eqn.primitive.name == "mul"]
    assert parts.replica.outvars[-1] is product
    assert parts.num_handed == 1


def read_by_replicas_too(weight, batch):
    total = lax.psum(batch, REPLICA_AXIS)
    return weight - total, total * batch


def returned_too(weight, batch):
    total = lax.psum(batch, REPLICA_AXIS)
    return weight - total, total


def of_another_shape(weight, batch):
    return weight - lax.psum(jnp.sum(batch), REPLICA_AXIS), batch


def within_groups(weight, batch):
    alone = lax.psum(batch, REPLICA_AXIS, axis_index_groups=[[0], [1]])
    return weight - lax.pmax(alone, REPLICA_AXIS), batch


@pytest.mark.parametrize(
    "step", [read_by_replicas_too, returned_too, of_another_shape, within_groups]
)
def test_other_sums_stay(step) -> None:
    before = parts_of(step)
    parts, axes = scatter_sums(before, of_weights(before), TOPOLOGY)
    assert axes == [None]
    assert sums(parts) == 1
    assert parts.replica.outvars == before.replica.outvars


def test_of_several_sums_in_one_operation_the_others_stay() -> None:
    def step(weight: Any, batch: Any) -> Any:
        wide, narrow = lax.psum((batch, jnp.sum(batch)), REPLICA_AXIS)
        return weight - wide * narrow, batch

    parts = parts_of(step)
    parts, axes = scatter_sums(parts, of_weights(parts), TOPOLOGY)
    assert sorted(axes, key=str) == [0, None]
    assert sums(parts) == 1
