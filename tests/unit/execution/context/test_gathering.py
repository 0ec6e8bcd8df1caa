"""`sg.all_gather`, inside and outside of replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg


def test_all_rows_on_each_replica_and_the_gradient_of_its_own() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    (rows,) = strategy.distribute_dataset([np.asarray([1.0, 2.0, 6.0], "float32")])

    def step(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.asarray([1.0, 10.0, 100.0])
        return jax.value_and_grad(lambda rows: jnp.sum(sg.all_gather(rows) * scale))(rows)

    values, gradients = strategy.run(step, args=(rows,))
    assert [float(value) for value in strategy.local_results(values)] == [621.0, 621.0]
    np.testing.assert_array_equal(strategy.gather(gradients, axis=0), [2.0, 20.0, 200.0])


def test_one_replica_has_all_rows() -> None:
    np.testing.assert_array_equal(sg.all_gather(np.ones((2, 3)), axis=1), np.ones((2, 3)))


def test_cross_replica_context_is_refused() -> None:
    with (
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
        pytest.raises(RuntimeError, match=r"cross-replica.*\n.*\nFix: use strategy.gather"),
    ):
        sg.all_gather(np.ones(2))
