"""Sums over replicas and the variables that they update, among others of the same shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.programs.sharded_program import store_for, stores_of_sums
from stratagem.execution.programs.update_part import StepParts, part_step
from stratagem.variables.layouts import Division
from stratagem.variables.sharded_store import ShardedStore

TOPOLOGY = Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))
STORE = ShardedStore(TOPOLOGY)
BY_ROWS = STORE.divided(Division((("logical",), ())))
BY_COLUMNS = STORE.divided(Division(((), ("logical",))))
SHAPE = (4, 4)


def variable(store: ShardedStore | None, shape: tuple[int, ...] = SHAPE) -> Any:
    return SimpleNamespace(store=store, shape=shape)


def parts_of(step: Any, num_written: int) -> StepParts:
    """Of a step that gets and returns variables, then gets a value of each replica."""
    copied = PartitionSpec()
    mesh = Mesh(np.array(jax.devices()[:2]), (REPLICA_AXIS,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=copied, out_specs=copied, check_vma=False)
    closed = jax.make_jaxpr(mapped)(*[jnp.ones(SHAPE)] * (num_written + 1))
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    differs = [*[False] * num_written, True]
    return part_step(eqn.params["jaxpr"], differs, [True] * num_written)


def test_gradient_belongs_to_the_variable_that_it_changes() -> None:
    """Also with momentum, a common scale, and the gradients in another order."""

    def step(first: Any, momentum: Any, second: Any, value: Any) -> Any:
        of_second = lax.psum(value * 2.0, REPLICA_AXIS)
        of_first = lax.psum(value * 3.0, REPLICA_AXIS)
        scale = jnp.sum(of_second) + jnp.sum(of_first)
        momentum = momentum * 0.9 + of_first * scale
        return first - momentum, momentum, second - of_second * scale

    parts = parts_of(step, 3)
    written = [variable(BY_ROWS), variable(BY_ROWS), variable(BY_COLUMNS)]
    trace: Any = SimpleNamespace(written=written)
    found = stores_of_sums(trace, parts, STORE)
    assert len(found) == 2
    by_factor = {}
    handed = parts.replica.outvars[len(parts.replica.outvars) - 2 :]
    made = {id(eqn.outvars[0]): eqn for eqn in parts.replica.eqns}
    for store, total in zip(found, handed, strict=True):
        product = made[id(made[id(total)].invars[0])]
        by_factor[float(product.invars[1].val)] = store
    assert by_factor == {2.0: BY_COLUMNS, 3.0: BY_ROWS}


def test_sum_without_a_variable_of_its_shape_has_no_store() -> None:
    def step(weight: Any, value: Any) -> Any:
        return (weight - lax.psum(jnp.sum(value), REPLICA_AXIS),)

    trace: Any = SimpleNamespace(written=[variable(BY_ROWS)])
    assert stores_of_sums(trace, parts_of(step, 1), STORE) == [None]


def test_sum_that_is_changed_in_shape_gets_the_first_store_of_its_shape() -> None:
    def step(weight: Any, value: Any) -> Any:
        changed = lax.psum(value, REPLICA_AXIS).reshape(16)[::-1].reshape(SHAPE)
        return (weight - changed,)

    trace: Any = SimpleNamespace(written=[variable(BY_COLUMNS)])
    assert stores_of_sums(trace, parts_of(step, 1), STORE) == [BY_COLUMNS]
    not_stored: Any = SimpleNamespace(written=[variable(None)])
    assert stores_of_sums(not_stored, parts_of(step, 1), STORE) == [None]


def test_replicated_variable_is_updated_as_its_slots_are_sharded() -> None:
    divided = SimpleNamespace(store=None, shape=SHAPE, division=Division(((), ("logical",))))
    assert store_for(divided, STORE) == BY_COLUMNS
    assert store_for(variable(None), STORE) is STORE
    assert store_for(variable(BY_ROWS), STORE) is BY_ROWS
