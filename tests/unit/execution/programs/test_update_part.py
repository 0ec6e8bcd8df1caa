"""Steps in two parts: together they compute what the whole does, and each what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.jaxprs import contains_primitive, differing_values
from stratagem.execution.programs.sharded_step import (
    StepParts,
    part_step,
    scatter_sums,
    with_split_conditionals,
)
from stratagem.variables.placement import ShardedStore

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


def read_by_both(weight, slot, rate, batch):
    moved = weight * 0.5  # by the update and by the forward pass
    return moved - lax.psum(moved * batch, AXIS), slot, rate, batch


def differing(weight, slot, rate, batch):
    own = lax.axis_index(AXIS).astype("float32")
    return weight + lax.psum(batch, AXIS) * own, slot, rate, batch


def unused(weight, slot, rate, batch):
    total = lax.psum(batch, AXIS)
    _ = jnp.sin(total * 2.0) + batch
    return weight - total, slot, rate, batch


# How many values replicas hand over, whether the weight and the slot are updated elsewhere, and an
# operation that stays on the replicas.
STEPS: dict[Step, tuple[int, bool, bool, str]] = {
    sgd: (1, True, False, "psum"),
    momentum: (1, True, True, "psum"),  # the summed gradient
    clipped: (2, True, True, "sqrt"),  # the gradient and its norm
    conditional: (1, True, True, "psum"),
    nothing_to_cut: (1, True, False, "mul"),
    read_by_both: (2, True, False, "mul"),
    differing: (0, False, False, "axis_index"),
    unused: (1, True, False, "psum"),
}
WEIGHT, SLOT, RATE = jnp.arange(1.0, 5.0), jnp.full(4, 0.5), jnp.float32(0.1)
BATCH = jnp.arange(8.0).reshape(NUM_REPLICAS, 4)
DIFFERS, MAY_UPDATE = [False, False, False, True], [True, True, True, False]


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


def jaxpr_of(step: Step, *args: Any) -> Jaxpr:
    mapped = jax.shard_map(step, mesh=MESH, in_specs=COPIED, out_specs=COPIED, check_vma=False)
    closed = jax.make_jaxpr(mapped)(*args)
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return eqn.params["jaxpr"]


def parts_of(step: Step) -> StepParts:
    jaxpr = jaxpr_of(step, WEIGHT, SLOT, RATE, BATCH[0])
    return part_step(jaxpr, DIFFERS, MAY_UPDATE)


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
def test_parts_compute_what_the_whole_does(step: Step) -> None:
    for got, wanted in zip(in_parts(step), whole(step), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    parts = parts_of(step)
    num_handed, updates_weight, updates_slot, stays = STEPS[step]
    assert parts.num_handed == num_handed
    assert parts.is_updated == [updates_weight, updates_slot, step is momentum, False]
    names = [eqn.primitive.name for eqn in parts.replica.eqns]
    assert stays in names
    assert "sin" not in [*names, *(eqn.primitive.name for eqn in parts.update.eqns)]
    assert not contains_primitive(parts.update, "psum", "psum_invariant", "axis_index")
    assert ("input", 3) not in parts.update_inputs
    if step is momentum:
        read = {id(atom) for eqn in parts.replica.eqns for atom in eqn.invars}
        assert not {id(atom) for atom in parts.replica.invars[1:3]} & read  # slot and rate


# Conditionals of an update: the split passes through them, and numbers and costs stay.
# Each step gets (weight, slot, count, batch) and returns a new weight, slot and count, and a result
# of the replicas. Only the batch differs between replicas.


def accumulation(weight, slot, count, batch):
    """The sum over replicas is left out: its result is equal on all, as the weight is."""
    is_due = count % 2 == 1
    slot, gradient = lax.cond(
        is_due, lambda: (jnp.zeros_like(slot), (slot + weight) / 2), lambda: (slot + weight, weight)
    )
    new = weight - 0.1 * gradient
    return lax.cond(is_due, lambda: new, lambda: weight), slot, count + 1, batch * weight


def nested(weight, slot, count, batch):
    def update() -> Any:
        scale = lax.cond(slot[0] > 0.1, lambda: 2.0, lambda: jnp.max(weight))
        halves = jnp.concatenate([slot * 0.5, weight])
        return weight * scale, jnp.reshape(halves, (2, 4)).sum(0), count + 1

    weight, slot, count = lax.cond(jnp.all(jnp.isfinite(slot)), update, lambda: (weight, slot, 0))
    return weight, slot, count, batch


def several_branches(weight, slot, count, batch):
    branches = [lambda w: w + 1.0, lambda w: w * 2.0, lambda w: w / 0.0]
    return lax.switch(count, branches, weight), slot, count, batch


def one_result(weight, slot, count, batch):
    """Replicas need one of the outputs, and its half of the work."""
    weight, factor = lax.cond(
        count > 0, lambda: (weight * jnp.sin(slot), jnp.cos(slot)), lambda: (weight, slot)
    )
    return weight, slot, count, batch * factor


def costly_branch(weight, slot, count, batch):
    square = slot[:, None] * slot
    weight = lax.cond(count > 0, lambda: square @ square @ weight, lambda: weight)
    return weight, slot, count, batch


def loop_in_a_branch(weight, slot, count, batch):
    body = lambda _, value: value * 0.5  # noqa: E731
    weight = lax.cond(count > 0, lambda: lax.fori_loop(0, 9, body, weight), lambda: weight)
    return weight, slot, count, batch


def within_the_loss(weight, slot, count, batch):
    scaled = lax.cond(count > 0, lambda: weight * 2.0, lambda: weight)
    return weight, slot, count, batch * scaled


def divergent_choice(weight, slot, count, batch):
    return lax.cond(batch[0] > 0, lambda: weight * 2.0, lambda: weight), slot, count, batch


# Conditionals and selections that are left.
STEPS_OF_CONDITIONAL_UPDATES: dict[Step, tuple[int, int]] = {
    accumulation: (0, 3),
    nested: (0, 4),
    several_branches: (0, 1),
    one_result: (1, 1),
    costly_branch: (1, 0),
    loop_in_a_branch: (1, 0),
    within_the_loss: (1, 0),
    divergent_choice: (1, 0),
}


def jaxprs_of(step: Step) -> tuple[Jaxpr, Jaxpr]:
    jaxpr = jax.make_jaxpr(step)(WEIGHT, SLOT, 0, BATCH[0]).jaxpr
    return jaxpr, with_split_conditionals(jaxpr, differing_values(jaxpr, DIFFERS), MAY_UPDATE)


def count_of(jaxpr: Jaxpr, name: str) -> int:
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns)


@pytest.mark.parametrize("step", STEPS_OF_CONDITIONAL_UPDATES)
def test_conditionals_of_cheap_updates_are_selections_with_the_same_numbers(step: Step) -> None:
    jaxpr, split = jaxprs_of(step)
    conditionals, selections = STEPS_OF_CONDITIONAL_UPDATES[step]
    assert count_of(split, "cond") == conditionals
    assert count_of(split, "select_n") - count_of(jaxpr, "select_n") == selections
    assert (split.invars, split.outvars) == (jaxpr.invars, jaxpr.outvars)
    for slot, count in ((SLOT, 2), (SLOT.at[2].set(np.nan), -3), (-SLOT, 1), (SLOT, 0)):
        inputs = [WEIGHT, slot, jnp.int32(count), BATCH[0]]
        got = jaxpr_as_fun(ClosedJaxpr(split, []))(*inputs)
        wanted = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_replicas_compute_only_the_outputs_they_need() -> None:
    _, split = jaxprs_of(one_result)
    (left,) = [eqn for eqn in split.eqns if eqn.primitive.name == "cond"]
    branches = [branch.jaxpr for branch in left.params["branches"]]
    assert any(contains_primitive(branch, "cos") for branch in branches)
    assert not any(contains_primitive(branch, "sin") for branch in branches)
    assert len(left.outvars) == 1
    assert len(left.invars) == 2  # the choice and the slot


# What replicas hand over to be added up in parts: only sums that nobody else reads.

TOPOLOGY = Topology(tuple(jax.devices()[:2]))
SHAPE = (4, 3)


def parts_of_pair(step: Callable[..., Any]) -> StepParts:
    """Of a step that gets a weight and a batch, and returns a new weight and a result."""
    jaxpr = jaxpr_of(step, jnp.ones(SHAPE), jnp.ones(SHAPE))
    return part_step(jaxpr, [False, True], [True, False])


def sums(parts: StepParts) -> int:
    return sum(len(eqn.invars) for eqn in parts.replica.eqns if eqn.primitive.name == "psum")


def of_weights(parts: StepParts) -> list[ShardedStore | None]:
    """The store of each value for the update; of a weight's shape only."""
    handed = parts.replica.outvars[len(parts.replica.outvars) - parts.num_handed :]
    store = ShardedStore(TOPOLOGY)
    return [store if atom.aval.shape == SHAPE else None for atom in handed]


def test_sum_of_the_update_alone_is_handed_over_as_what_is_added_up() -> None:
    parts = parts_of_pair(
        lambda weight, batch: (weight - lax.psum(batch * weight, REPLICA_AXIS), batch)
    )
    assert sums(parts) == 1
    parts, axes = scatter_sums(parts, of_weights(parts), TOPOLOGY)
    assert axes == [0]
    assert sums(parts) == 0
    (product,) = [eqn.outvars[0] for eqn in parts.replica.eqns if eqn.primitive.name == "mul"]
    assert parts.replica.outvars[-1] is product
    assert parts.num_handed == 1


def summed(value: Any, **options: Any) -> Any:
    return lax.psum(value, REPLICA_AXIS, **options)


# Of a weight and a batch: the new weight, and a result of the replicas.
OTHER_SUMS = {
    "read by replicas": lambda w, x: (w - (total := summed(x)), total * x),
    "returned": lambda w, x: (w - (total := summed(x)), total),
    "of another shape": lambda w, x: (w - summed(jnp.sum(x)), x),
    "within groups": lambda w, x: (
        w - lax.pmax(summed(x, axis_index_groups=[[0], [1]]), REPLICA_AXIS), x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", OTHER_SUMS.values(), ids=OTHER_SUMS)
def test_other_sums_stay(step) -> None:
    before = parts_of_pair(step)
    parts, axes = scatter_sums(before, of_weights(before), TOPOLOGY)
    assert axes == [None]
    assert sums(parts) == 1
    assert parts.replica.outvars == before.replica.outvars


def test_of_several_sums_in_one_operation_the_others_stay() -> None:
    def step(weight: Any, batch: Any) -> Any:
        wide, narrow = lax.psum((batch, jnp.sum(batch)), REPLICA_AXIS)
        return weight - wide * narrow, batch

    parts = parts_of_pair(step)
    parts, axes = scatter_sums(parts, of_weights(parts), TOPOLOGY)
    assert sorted(axes, key=str) == [0, None]
    assert sums(parts) == 1
