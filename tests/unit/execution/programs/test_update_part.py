"""Steps in two parts: together they compute what the whole does, and each what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from stratagem.execution.analysis.replication import contains_primitive
from stratagem.execution.programs.update_part import StepParts, part_step

AXIS = "replica"
NUM_REPLICAS = 2
MESH = Mesh(np.array(jax.devices()[:NUM_REPLICAS]), (AXIS,))
COPIED, STACKED = PartitionSpec(), PartitionSpec(AXIS)

# Each step gets (weight, slot, rate) and a batch of its own, and returns new values of all three
# and a result.
Step = Callable[..., Any]


def sgd(weight, slot, rate, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((batch * w) ** 2))(weight)
    return weight - rate * lax.psum(gradient, AXIS), slot, rate, loss


def momentum(weight, slot, rate, batch):
    gradient = lax.psum(jax.grad(lambda w: jnp.sum((batch * w) ** 2))(weight), AXIS)
    slot = 0.9 * slot + gradient
    return weight - rate * slot, slot, rate * 0.99, jnp.mean(batch)


def clipped(weight, slot, rate, batch):
    """The norm is a result too, so that it is computed on the replicas."""
    gradient = lax.psum(batch, AXIS)
    norm = jnp.sqrt(jnp.sum(gradient**2))
    slot = slot + 1.0
    return weight - rate * gradient / jnp.maximum(norm, 1.0), slot, rate, norm * batch


def conditional(weight, slot, rate, batch):
    gradient = lax.psum(batch, AXIS)
    weight = lax.cond(slot[0] > 0, lambda: weight - gradient, lambda: weight + gradient)
    return weight, lax.fori_loop(0, 3, lambda i, x: x * 1.5, slot), rate, batch


def nothing_to_cut(weight, slot, rate, batch):
    return weight + lax.psum(weight * batch, AXIS), slot, rate, batch * rate


STEPS = {one.__name__: one for one in (sgd, momentum, clipped, conditional, nothing_to_cut)}
WEIGHT, SLOT, RATE = jnp.arange(1.0, 5.0), jnp.full(4, 0.5), jnp.float32(0.1)
BATCH = jnp.arange(8.0).reshape(NUM_REPLICAS, 4)


def mapped(function: Callable[..., Any], num_stacked_results: int, num_copied: int) -> Any:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=MESH,
            in_specs=(COPIED, COPIED, COPIED, STACKED),
            out_specs=([COPIED] * num_copied, [STACKED] * num_stacked_results),
            check_vma=False,
        )
    )


def whole(step: Step) -> list[np.ndarray]:
    def function(weight, slot, rate, batch):
        *values, result = step(weight, slot, rate, batch[0])
        return values, [result[None]]

    values, results = mapped(function, 1, 3)(WEIGHT, SLOT, RATE, BATCH)
    return [np.asarray(value) for value in (*values, *results)]


def jaxpr_of(step: Step) -> ClosedJaxpr:
    mesh_step = jax.shard_map(
        lambda weight, slot, rate, batch: step(weight, slot, rate, batch),
        mesh=MESH,
        in_specs=COPIED,
        out_specs=COPIED,
        check_vma=False,
    )
    closed = jax.make_jaxpr(mesh_step)(WEIGHT, SLOT, RATE, BATCH[0])
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return ClosedJaxpr(eqn.params["jaxpr"], [])


def parts_of(step: Step) -> StepParts:
    differing = [False, False, False, True]
    return part_step(jaxpr_of(step).jaxpr, differing, [True, True, True, False])


def in_parts(step: Step) -> list[np.ndarray]:
    parts = parts_of(step)
    stays = len(parts.is_updated) - sum(parts.is_updated)

    def function(weight, slot, rate, batch):
        outputs = jaxpr_as_fun(ClosedJaxpr(parts.replica, []))(weight, slot, rate, batch[0])
        kept, handed = outputs[:stays], outputs[stays:]
        return [*kept[:-1], *handed], [kept[-1][None]]

    copied, (result,) = mapped(function, 1, stays - 1 + parts.num_handed)(WEIGHT, SLOT, RATE, BATCH)
    # On one device, from the copy of one replica.
    kept = iter(np.asarray(value) for value in copied[: stays - 1])
    handed = [np.asarray(value) for value in copied[stays - 1 :]]
    pools = {"input": [WEIGHT, SLOT, RATE, None], "handed": handed}
    inputs = [pools[source][index] for source, index in parts.update_inputs]
    updated = iter(jaxpr_as_fun(ClosedJaxpr(parts.update, []))(*inputs))
    values = [next(updated) if one else next(kept) for one in parts.is_updated[:3]]
    return [np.asarray(value) for value in (*values, result)]


@pytest.mark.parametrize("step", STEPS)
def test_parts_compute_what_the_whole_does(step) -> None:
    for got, wanted in zip(in_parts(STEPS[step]), whole(STEPS[step]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_update_needs_no_replicas(step) -> None:
    parts = parts_of(STEPS[step])
    assert not contains_primitive(parts.update, "psum", "psum_invariant", "axis_index")
    assert ("input", 3) not in parts.update_inputs


def test_replicas_do_not_see_what_only_the_update_reads() -> None:
    parts = parts_of(momentum)
    read = {id(atom) for eqn in parts.replica.eqns for atom in eqn.invars}
    weight, slot, rate, batch = parts.replica.invars
    assert {id(weight), id(batch)} <= read
    assert not {id(slot), id(rate)} & read
    assert parts.is_updated == [True, True, True, False]
    assert parts.num_handed == 1  # the summed gradient


def test_what_a_result_depends_on_stays_on_the_replicas() -> None:
    parts = parts_of(clipped)
    names = [eqn.primitive.name for eqn in parts.replica.eqns]
    assert "sqrt" in names
    assert parts.num_handed == 2  # the gradient and its norm


def test_values_that_replicas_need_stay_with_them() -> None:
    def step(weight, slot, rate, batch):
        moved = weight * 0.5  # read by the update and by the forward pass
        return moved - lax.psum(moved * batch, AXIS), slot, rate, batch

    parts = parts_of(step)
    for got, wanted in zip(in_parts(step), whole(step), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert parts.is_updated == [True, False, False, False]


def test_nothing_is_cut_off_where_replicas_may_differ() -> None:
    def step(weight, slot, rate, batch):
        return (
            weight + lax.psum(batch, AXIS) * lax.axis_index(AXIS).astype("float32"),
            slot,
            rate,
            batch,
        )

    parts = parts_of(step)
    assert parts.is_updated == [False] * 4
    assert not parts.update.eqns


def test_what_nothing_depends_on_is_left_out() -> None:
    def step(weight, slot, rate, batch):
        total = lax.psum(batch, AXIS)
        _ = jnp.sin(total * 2.0) + batch
        return weight - total, slot, rate, batch

    parts = parts_of(step)
    assert "sin" not in [eqn.primitive.name for eqn in (*parts.replica.eqns, *parts.update.eqns)]
    assert parts.is_updated == [True, False, False, False]
