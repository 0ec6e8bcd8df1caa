"""Small outputs that are computed as soon as their inputs are there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.late_gathers import late_step
from stratagem.execution.late_gathers.late_step import LateStep, with_early_outputs
from stratagem.execution.late_gathers.weights import Sharded

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
LARGE = 2**17


def step(x: Any, total: Any) -> Any:
    """A training step in the order of Keras: metrics come last, and need what came first."""
    logits = jnp.sin(x)
    gradient = jnp.cos(jnp.cos(logits)) * 2
    new_weight = jnp.tile(gradient.reshape(-1), LARGE)
    metric = jnp.sum(jnp.square(logits))
    return new_weight, total + metric, jnp.max(new_weight)


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_metrics_follow_their_inputs() -> None:
    before = jax.make_jaxpr(step)(X, 0.0).jaxpr
    after = with_early_outputs(before)
    assert names(before).index("square") > names(before).index("cos")
    first = names(after).index("sin")
    assert names(after)[first : first + 3] == ["sin", "square", "reduce_sum"]
    assert names(after)[-1] == "reduce_max"  # needs what was computed last
    assert sorted(names(before)) == sorted(names(after))
    for one, other in zip(
        eval_jaxpr(before, [], X, 1.0), eval_jaxpr(after, [], X, 1.0), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_large_outputs_stay_in_their_place() -> None:
    jaxpr = jax.make_jaxpr(lambda x: (jnp.cos(jnp.cos(x)), jnp.sin(x)))(np.ones(LARGE)).jaxpr
    assert names(with_early_outputs(jaxpr)) == ["cos", "cos", "sin"]


def test_operations_with_effects_stay_in_their_place() -> None:
    def printing(x: Any) -> Any:
        y = jnp.cos(jnp.cos(jnp.tile(x, LARGE)))
        jax.debug.print("{}", x)
        return y

    jaxpr = jax.make_jaxpr(printing)(1.0).jaxpr
    assert names(with_early_outputs(jaxpr)) == names(jaxpr)


@pytest.mark.parametrize("is_first", [True, False])
def test_operations_with_weights_wait_for_the_loss(monkeypatch, is_first) -> None:
    """The compiler would compute it last, and keep its operand to the end."""
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)
    devices = jax.devices()[:2]

    def train(weights: Any, x: Any) -> Any:
        y = x @ weights[0]
        loss = jnp.sum(jnp.square(y)) if is_first else 0.0
        for one in weights[1:]:
            y = y @ one
        return loss if is_first else jnp.sum(y), jnp.tile(y.reshape(-1), LARGE)

    weights = [np.ones((4, 4), "float32")] * 4
    closed = jax.make_jaxpr(train)(weights, X)
    sharded = Sharded(0, PartitionSpec(), Topology(tuple(devices)))
    late = LateStep(
        closed.jaxpr, [sharded] * 4 + [None], [True] * 4 + [False], {}, [], 2, returned=[0, 1]
    )
    split = PartitionSpec(REPLICA_AXIS)
    function = jax.shard_map(
        lambda *args: late.outputs(dict(enumerate(args)))[0],
        mesh=Mesh(np.array(devices), (REPLICA_AXIS,)),
        in_specs=(*[split] * 4, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    (eqn,) = jax.make_jaxpr(function)(*weights, X).jaxpr.eqns
    inner = eqn.params["jaxpr"]
    waiting = [
        one
        for one in inner.eqns
        if one.primitive.name == "optimization_barrier"
        and any(atom.aval.shape == () for atom in one.invars)
    ]
    assert len(waiting) == is_first
    expected = train([jnp.array(one) for one in weights], X)[0]
    np.testing.assert_allclose(jax.jit(function)(*weights, X)[0], expected, rtol=1e-6)
