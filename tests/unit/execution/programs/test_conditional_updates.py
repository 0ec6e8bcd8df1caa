"""Conditionals of an update: the split passes through them, and numbers and costs stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from stratagem.execution.analysis.replication import contains_primitive, differing_values
from stratagem.execution.programs.update_part import with_split_conditionals

# Each step gets (weight, slot, count, batch) and returns a new weight, slot and count, and a result
# of the replicas. Only the batch differs between replicas.
WEIGHT, SLOT, BATCH = jnp.arange(1.0, 5.0), jnp.full(4, 0.5), jnp.arange(4.0)
DIFFERS, MAY_UPDATE = [False, False, False, True], [True, True, True, False]

Step = Callable[..., Any]


def accumulation(weight, slot, count, batch):
    """The sum over replicas is left out: its result is equal on all, as the weight is."""
    is_due = count % 2 == 1
    slot, gradient = lax.cond(
        is_due,
        lambda: (jnp.zeros_like(slot), (slot + weight) / 2),
        lambda: (slot + weight, weight),
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
        count > 0,
        lambda: (weight * jnp.sin(slot), jnp.cos(slot)),
        lambda: (weight, slot),
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
STEPS: dict[Step, tuple[int, int]] = {
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
    jaxpr = jax.make_jaxpr(step)(WEIGHT, SLOT, 0, BATCH).jaxpr
    return jaxpr, with_split_conditionals(jaxpr, differing_values(jaxpr, DIFFERS), MAY_UPDATE)


def count_of(jaxpr: Jaxpr, name: str) -> int:
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "count", [2, -3, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1, 7))]
)
def test_numbers_are_those_of_the_step(step: Step, count: int) -> None:
    jaxpr, split = jaxprs_of(step)
    for slot in (SLOT, SLOT.at[2].set(np.nan), -SLOT):
        inputs = [WEIGHT, slot, jnp.int32(count), BATCH]
        got = jaxpr_as_fun(ClosedJaxpr(split, []))(*inputs)
        wanted = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("step", STEPS)
def test_conditionals_of_cheap_updates_are_selections(step: Step) -> None:
    jaxpr, split = jaxprs_of(step)
    conditionals, selections = STEPS[step]
    assert count_of(split, "cond") == conditionals
    assert count_of(split, "select_n") - count_of(jaxpr, "select_n") == selections


def test_replicas_compute_only_the_outputs_they_need() -> None:
    _, split = jaxprs_of(one_result)
    (left,) = [eqn for eqn in split.eqns if eqn.primitive.name == "cond"]
    branches = [branch.jaxpr for branch in left.params["branches"]]
    assert any(contains_primitive(branch, "cos") for branch in branches)
    assert not any(contains_primitive(branch, "sin") for branch in branches)
    assert len(left.outvars) == 1
    assert len(left.invars) == 2  # the choice and the slot


def test_inputs_and_results_stay_in_their_order() -> None:
    for step in STEPS:
        jaxpr, split = jaxprs_of(step)
        assert split.invars == jaxpr.invars
        assert split.outvars == jaxpr.outvars
