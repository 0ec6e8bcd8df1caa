"""Arrays joined from parts: the replication analysis takes them for sums over replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.all_reduce import is_sum_over_replicas, joined


def gathered(part):
    groups = [[0, 1], [2, 3]]
    return jax.lax.all_gather(part, "row", tiled=True, axis_index_groups=groups)


def test_joined_array_is_what_the_function_gathers() -> None:
    assert joined(lambda part: jnp.concatenate([part, 2 * part]), jnp.ones(1)).tolist() == [1, 2]


def test_trace_marks_the_joined_array_only() -> None:
    def step(part):
        return joined(gathered, part), gathered(part)

    traced = jax.make_jaxpr(step, axis_env=[("row", 4)])(np.ones(2, np.float32))
    marks = [is_sum_over_replicas(eqn) for eqn in traced.eqns]
    assert marks == [True, False]
