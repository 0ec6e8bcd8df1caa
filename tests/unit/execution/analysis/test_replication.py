"""Which results of a step are provably the same on every replica: cases on either side of the line.

Each function is given a value that is the same everywhere and one that is the replica's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.all_reduce import Algorithm, ReplicaAxis
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.jaxprs import differing_outputs
from stratagem.options import ReduceOp

AXIS = "replica"
NUM_REPLICAS = 4
GROUPS = ((0, 1), (2, 3))
REDUCTIONS = {
    algorithm.value: MeshCommunicator(ReplicaAxis(AXIS, NUM_REPLICAS, GROUPS), algorithm)
    for algorithm in Algorithm
} | {"in_bfloat16": MeshCommunicator(ReplicaAxis(AXIS, NUM_REPLICAS), in_bfloat16=True)}
GATHERED = MeshCommunicator(
    ReplicaAxis(AXIS, NUM_REPLICAS), combine=lambda op, stacks: [sum(parts) for parts in stacks]
)


def jaxpr_of(fn: Callable[..., Any]) -> Any:
    """The trace of one replica, as the compiled execution sees it."""
    mesh = Mesh(np.array(jax.devices()[:NUM_REPLICAS]), (AXIS,))
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    traced = jax.make_jaxpr(mapped)(jnp.ones(4), jnp.ones(4))
    (step,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    return step.params["jaxpr"]


def differing(fn: Callable[..., Any]) -> list[bool]:
    """Whether each output of `fn(same, own)` may differ between replicas."""
    return differing_outputs(jaxpr_of(fn), [False, True])


@jax.custom_vjp
def doubled(x):
    return 2.0 * x


doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))


@jax.custom_jvp
def tripled(x):
    return 3.0 * x


tripled.defjvp(lambda primals, tangents: (3.0 * primals[0], 3.0 * tangents[0]))


def replica_number():
    return lax.axis_index(AXIS).astype("float32")


def scanned(body, carry, xs=None):
    return lax.scan(body, carry, xs, length=None if xs is not None else 3)[0]


def counted(start, bound, step):
    """A while loop from `start` to `bound`."""
    return lax.while_loop(lambda x: x < bound, lambda x: x + step, start)


def written_and_read(value):
    cell = jax.new_ref(jnp.zeros(4))
    cell[...] = value
    return cell[...]


def called_back(value):
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.pure_callback(lambda x: x, shape, value)


def called_out(_):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return io_callback(lambda: np.float32(1.0), shape)


SAME = {
    "input": lambda same, own: same,
    "constant": lambda same, own: jnp.ones(3),
    "literal": lambda same, own: 1.0,
    "arithmetic": lambda same, own: jnp.sin(same) * 2.0 + same,
    "unused_own": lambda same, own: (own * 2.0, same)[1],
    "psum": lambda same, own: lax.psum(own, AXIS),
    "pmean": lambda same, own: lax.pmean(own, AXIS),
    "pmax": lambda same, own: lax.pmax(own, AXIS),
    "pmin": lambda same, own: lax.pmin(own, AXIS),
    "all_gather": lambda same, own: lax.all_gather(own, AXIS),
    "sum_by_a_function": lambda same, own: GATHERED.all_reduce(ReduceOp.SUM, own),
    "psum_of_the_replica_id": lambda same, own: lax.psum(replica_number(), AXIS),
    "axis_size": lambda same, own: lax.psum(1, AXIS),
    "cond": lambda same, own: lax.cond(same[0] > 0, jnp.sin, jnp.cos, same),
    "cond_with_psum_inside": (
        lambda same, own: lax.cond(
            same[0] > 0, lambda x: lax.psum(x, AXIS), lambda x: lax.pmax(x, AXIS), own
        )
    ),
    "scan": lambda same, own: scanned(lambda c, x: (c + x, own), jnp.float32(0.0), same),
    "scan_with_psum_inside": (
        lambda same, own: scanned(lambda c, _: (c + lax.psum(own, AXIS), None), same)
    ),
    "while": lambda same, own: counted(same[0], same[1] + 5.0, same[2]),
    "fori": lambda same, own: lax.fori_loop(0, 3, lambda i, x: x * 2.0, same),
    "while_with_psum_inside": (
        lambda same, own: lax.fori_loop(0, 3, lambda i, x: x + lax.psum(own, AXIS), same)
    ),
    "nested_jit": lambda same, own: jax.jit(lambda a, b: (a * 2.0, b))(same, own)[0],
    "nested_jit_with_psum": lambda same, own: jax.jit(lambda x: lax.psum(x, AXIS))(own),
    "remat": lambda same, own: jax.checkpoint(lambda a, b: (a * 2.0, b))(same, own)[0],
    "custom_vjp": lambda same, own: doubled(same),
    "custom_jvp": lambda same, own: tripled(same),
    "gradient": lambda same, own: jax.grad(lambda x: jnp.sum(doubled(x) ** 2))(same),
    "random": lambda same, own: jax.random.normal(jax.random.key(0), (3,)) * same[0],
    "pure_callback": lambda same, own: called_back(same),
    "reference": lambda same, own: written_and_read(same),
}
DIFFERING = {
    "input": lambda same, own: own,
    "arithmetic": lambda same, own: same + 0.0 * own,
    "replica_id": lambda same, own: replica_number(),
    "psum_scatter": lambda same, own: lax.psum_scatter(same, AXIS, tiled=True),
    "ppermute": lambda same, own: lax.ppermute(same, AXIS, [(0, 1)]),
    "all_to_all": lambda same, own: lax.all_to_all(same, AXIS, 0, 0, tiled=True),
    "psum_in_groups": (lambda same, own: lax.psum(own, AXIS, axis_index_groups=[[0, 1], [2, 3]])),
    "psum_times_own": lambda same, own: lax.psum(own, AXIS) * own,
    "cond_branch": lambda same, own: lax.cond(same[0] > 0, lambda: own, lambda: same),
    "cond_predicate": lambda same, own: lax.cond(own[0] > 0, lambda: same, lambda: 2 * same),
    "cond_replica_id_inside": (
        lambda same, own: lax.cond(same[0] > 0, replica_number, lambda: same[0])
    ),
    "switch_index": (
        lambda same, own: lax.switch(lax.axis_index(AXIS), [lambda: same, lambda: 2 * same])
    ),
    "scan_rows": lambda same, own: scanned(lambda c, x: (c + x, None), jnp.float32(0.0), own),
    "scan_start": lambda same, own: scanned(lambda c, _: (c * 2.0, None), own),
    "scan_closure": lambda same, own: scanned(lambda c, _: (c + own, None), same),
    "scan_second_round": (
        lambda same, own: scanned(lambda c, _: ((c[1], own), None), (same, same))[0]
    ),
    "while_bound": lambda same, own: counted(same[0], own[0], same[1]),
    "while_step": lambda same, own: counted(same[0], same[1] + 5.0, own[0]),
    "while_start": lambda same, own: counted(own[0], same[1] + 5.0, same[0]),
    "while_second_round": (
        lambda same, own: lax.fori_loop(0, 3, lambda i, c: (c[1], own), (same, same))[0]
    ),
    "nested_jit": lambda same, own: jax.jit(lambda a, b: (a, b + a))(same, own)[1],
    "nested_jit_replica_id": lambda same, own: jax.jit(lambda x: x * replica_number())(same),
    "remat": lambda same, own: jax.checkpoint(lambda a, b: (a, b + a))(same, own)[1],
    "custom_vjp": lambda same, own: doubled(own),
    "custom_jvp": lambda same, own: tripled(own),
    "gradient": lambda same, own: jax.grad(lambda x: jnp.sum(doubled(x) * own))(same),
    "random": (
        lambda same, own: jax.random.normal(
            jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), (3,)
        )
    ),
    "pure_callback": lambda same, own: called_back(own),
    "io_callback": lambda same, own: called_out(same),
    "reference": lambda same, own: written_and_read(own),
}


@pytest.mark.compatibility
@pytest.mark.parametrize("case", SAME)
def test_result_is_proven_the_same(case) -> None:
    assert differing(SAME[case]) == [False]


@pytest.mark.compatibility
@pytest.mark.parametrize("case", DIFFERING)
def test_result_may_differ(case) -> None:
    assert differing(DIFFERING[case]) == [True]


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sum_is_proven_the_same_whatever_its_messages(reduction, op) -> None:
    chosen = REDUCTIONS[reduction]

    def step(same, own):
        def loss(value):
            return jnp.sum(chosen.all_reduce_many(op, [value])[0] * same)

        (total,) = chosen.all_reduce_many(op, [own])
        return (
            total,
            jax.grad(loss)(own),
            jax.vmap(lambda row: chosen.all_reduce(op, row))(own),
            total + own,
        )

    assert differing(step) == [False, False, False, True]


def test_each_result_has_its_own_answer() -> None:
    def step(same, own):
        total = lax.psum(own, AXIS)
        last, rows = lax.scan(lambda c, x: (c + 1.0, c + x), same[0], own)
        return own, total, total + own, last, rows

    assert differing(step) == [True, False, True, False, True]
