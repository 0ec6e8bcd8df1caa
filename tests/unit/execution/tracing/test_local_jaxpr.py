"""The program of one replica, without inputs that nothing reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.execution.tracing.remote_state import (
    UNTOUCHED,
    local_jaxpr,
    without_unused_variables,
)

CONSTANT = np.arange(3, dtype=np.float32)


def test_one_replica_is_the_program_itself_without_untouched_inputs() -> None:
    closed = jax.make_jaxpr(lambda a, unused, b: a * b + CONSTANT)(*np.ones((3, 3), np.float32))
    sources = [("argument", 0), UNTOUCHED, ("argument", 1)]
    program, inputs, constants = local_jaxpr(closed, sources, Topology(None))
    values = {("argument", 0): 2 * CONSTANT, ("argument", 1): 3 * CONSTANT}
    values |= {("constant", index): value for index, value in enumerate(constants)}
    assert set(inputs) == set(values)
    (result,) = jaxpr_as_fun(program)(*[jnp.asarray(values[source]) for source in inputs])
    np.testing.assert_allclose(result, 6 * CONSTANT**2 + CONSTANT)


def test_program_of_a_replica_is_inside_of_shard_map() -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    mesh = Mesh(np.array(topology.devices), ("replica",))
    mapped = jax.shard_map(
        lambda part, shared, unused: part * shared,
        mesh=mesh,
        in_specs=(PartitionSpec("replica"), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    closed = jax.make_jaxpr(mapped)(np.ones((2, 3), np.float32), CONSTANT, CONSTANT)
    sources = [("stacked", 0), ("shared", 0), UNTOUCHED]
    program, inputs, constants = local_jaxpr(closed, sources, topology)
    assert inputs == sources[:2]
    assert constants == []
    assert [aval.shape for aval in program.in_avals] == [(1, 3), (3,)]
    (result,) = jaxpr_as_fun(program)(jnp.full((1, 3), 2.0), jnp.asarray(CONSTANT))
    np.testing.assert_array_equal(result, [2 * CONSTANT])


def test_read_only_variables_without_use_are_dropped_and_others_renumbered() -> None:
    closed = jax.make_jaxpr(lambda a, b, c, d: (a + c, d))(*np.ones((4, 2), np.float32))
    inputs = [("read_only", 0), ("read_only", 1), ("read_only", 2), ("argument", 7)]
    program, remaining, used, _ = without_unused_variables(closed, inputs, ["va", "vb", "vc"])
    assert remaining == [("read_only", 0), ("read_only", 1), ("argument", 7)]
    assert used == ["va", "vc"]
    a, c, d = (jnp.full(2, value) for value in (1.0, 10.0, 100.0))
    np.testing.assert_array_equal(jaxpr_as_fun(program)(a, c, d)[0], [11, 11])
