"""Scans over stacked weights: an iteration gathers and sums its own layer's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stratagem.execution.programs import late_step
from tests.unit.execution.programs.test_late_step import (
    WIDTH,
    batches,
    equations,
    gradients,
    late,
    weight,
)


@pytest.fixture(autouse=True)
def _no_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)


def _stack(*weights: Any) -> Any:
    return lax.concatenate([lax.expand_dims(one, (0,)) for one in weights], 0)


def stacked(first: Any, second: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w) @ w), None

    return jnp.sum(lax.scan(layer, batch, _stack(first, second))[0])


def recomputed(first: Any, second: Any, batch: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None))
    return jnp.sum(lax.scan(layer, batch, _stack(first, second))[0])


def half_precision(first: Any, second: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    x = batch.astype(jnp.bfloat16)
    return jnp.sum(lax.scan(layer, x, _stack(first, second))[0].astype(jnp.float32))


def stack_of_a_variable(first: Any, second: Any, batch: Any) -> Any:
    """A user's own loop: the rows of `first` are the weights of its iterations."""
    x, _ = lax.scan(lambda x, row: (jnp.tanh(x * row), None), batch, first)
    return jnp.sum(x @ second)


def _in_loops(step: Callable[..., Any], name: str) -> list[Any]:
    jaxpr = jax.make_jaxpr(step)(weight(0), weight(1), batches()).jaxpr
    loops = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    inside = [eqn for loop in loops for eqn in equations(loop.params["jaxpr"].jaxpr)]
    return [eqn for eqn in inside if eqn.primitive.name == name]


@pytest.mark.parametrize(
    ("loss", "axis"),
    [(stacked, 0), (recomputed, 1), (half_precision, 0), (stack_of_a_variable, 1)],
)
def test_gradients_are_those_of_whole_weights(loss: Callable[..., Any], axis: int) -> None:
    step = gradients(loss)
    sums = {1: axis, 2: axis}
    found = jax.jit(late(step, [axis, axis], sums))(weight(0), weight(1), batches())
    replicas = [jax.tree.leaves(jax.jit(step)(weight(0), weight(1), one)) for one in batches()]
    tolerance = 2e-2 if loss is half_precision else 1e-5
    for place in (1, 2):
        total = sum(one[place] for one in replicas)
        np.testing.assert_allclose(found[place], total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss", [stacked, recomputed, half_precision])
def test_iterations_gather_and_sum_their_own_layer(loss: Callable[..., Any]) -> None:
    step = late(gradients(loss), [0, 0], {1: 0, 2: 0})
    gathered = _in_loops(step, "all_gather")
    summed = _in_loops(step, "reduce_scatter")
    assert len(gathered) >= 2  # in each pass
    assert {one.outvars[0].aval.shape for one in gathered} == {(WIDTH, WIDTH)}
    assert [one.invars[0].aval.shape for one in summed] == [(WIDTH, WIDTH)]
    every = jax.make_jaxpr(step)(weight(0), weight(1), batches()).jaxpr
    names = [eqn.primitive.name for eqn in equations(every)]
    assert names.count("all_gather") == len(gathered)
    assert names.count("reduce_scatter") == 1


def test_stacks_are_of_the_dtype_that_is_computed_in() -> None:
    gathered = _in_loops(late(gradients(half_precision), [0, 0]), "all_gather")
    assert {one.invars[0].aval.dtype for one in gathered} == {jnp.dtype("bfloat16")}


def test_slices_of_a_variable_are_gathered_late_if_it_is_not_sharded_by_them() -> None:
    step = gradients(stack_of_a_variable)
    assert not _in_loops(late(step, [0, 0], {1: 0}), "all_gather")
    gathered = _in_loops(late(step, [1, 0], {1: 1}), "all_gather")
    assert {one.outvars[0].aval.shape for one in gathered} == {(WIDTH,)}
    assert len(_in_loops(late(step, [1, 0], {1: 1}), "reduce_scatter")) == 1


def test_gradient_that_something_else_reads_is_summed_after_the_loop() -> None:
    def step(first: Any, second: Any, batch: Any) -> Any:
        loss, (one, other) = gradients(stacked)(first, second, batch)
        return loss + jnp.sum(one), one, other

    assert not _in_loops(late(step, [0, 0], {1: 0, 2: 0}), "reduce_scatter")
    found = jax.jit(late(step, [0, 0], {1: 0, 2: 0}))(weight(0), weight(1), batches())
    expected = [step(weight(0), weight(1), one) for one in batches()]
    total = sum(np.asarray(one[1]) for one in expected)
    np.testing.assert_allclose(found[1], total, rtol=1e-5, atol=1e-5)
