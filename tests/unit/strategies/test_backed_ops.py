"""Means over the replicas that take part, of sums that stand for all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.execution.analysis.retracing import retrace
from stratagem.strategies.elastic import BackedOps

_PARTS = np.array([[1.0, 2.0], [4.0, 8.0], [100.0, 100.0]])


def _combined(op: sg.ReduceOp, dtype: str, scale: float, participants: list[int]) -> Any:
    """Returns the result of a step in which sums of floats are those of some replicas, scaled."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    all_reduce = BackedOps().all_reduce(strategy.topology)
    traced = jax.make_jaxpr(lambda x: all_reduce.one(op, x), axis_env=[(REPLICA_AXIS, 3)])(
        jnp.asarray(_PARTS[0], dtype)
    )
    totals = iter([_PARTS[participants].sum(0), np.float64(len(participants))])

    def add(eqn: Any, inputs: list[Any], is_inside: bool) -> list[Any]:
        del is_inside
        results = []
        for one in inputs:
            factor = scale if jnp.issubdtype(one.dtype, jnp.inexact) else 1
            results.append(jnp.asarray(next(totals) * factor, one.dtype))
        return results

    rules = dict.fromkeys(("psum", "psum_invariant"), add)
    return retrace(traced, [jnp.asarray(_PARTS[0], dtype)], rules=rules)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_mean_is_that_of_the_participants_for_any_rows_of_theirs(dtype) -> None:
    mean = _combined(sg.ReduceOp.MEAN, dtype, 32 / 21, [0, 1])
    np.testing.assert_allclose(np.asarray(mean, np.float32), [2.5, 5.0], rtol=1e-2)
    assert mean.dtype == (jnp.float32 if dtype == "int32" else jnp.dtype(dtype))


def test_a_sum_is_what_the_members_combine() -> None:
    total = _combined(sg.ReduceOp.SUM, "float32", 1.5, [0, 1])
    np.testing.assert_allclose(total, [7.5, 15.0])


def test_values_outside_of_a_step_are_reduced_as_always() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    all_reduce = BackedOps().all_reduce(strategy.topology)
    mean = all_reduce.parts(sg.ReduceOp.MEAN, [1.0, 4.0], are_gradients=True)
    assert float(mean) == 2.5
    assert all_reduce.axis.size == 2
