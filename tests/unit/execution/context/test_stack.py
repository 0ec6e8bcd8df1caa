"""The strategy of a program and of its threads, and `sg.all_gather` inside and outside replicas."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg


def test_set_strategy_holds_for_every_thread_until_it_is_reset() -> None:
    first, second = (sg.MirroredStrategy(devices) for devices in (["cpu:0", "cpu:1"], ["cpu:2"]))

    def place() -> tuple[Any, ...]:
        replica = sg.get_replica_context()
        return sg.get_strategy(), sg.has_strategy(), sg.in_cross_replica_context(), replica

    default = sg.get_strategy()
    sg.set_strategy(first)
    try:
        assert place() == (first, True, True, None)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(place).result() == (first, True, True, None)
        sg.set_strategy(second)
        with second.scope():
            assert sg.get_strategy() is second
        words = (
            r"inside the scope of MirroredStrategy\(cpu:2(?s:.)*call sg.set_strategy\(None\) bef"
        )
        with pytest.raises(RuntimeError, match=words), first.scope():
            pass
        sg.set_strategy(default)
        assert not sg.has_strategy()
        assert sg.get_replica_context() is not None
        sg.set_strategy(first)
    finally:
        sg.set_strategy(None)
    assert sg.get_strategy() is default


def test_all_rows_on_each_replica_and_the_gradient_of_its_own() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    (rows,) = strategy.distribute_dataset([np.asarray([1.0, 2.0, 6.0], "float32")])

    def step(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.asarray([1.0, 10.0, 100.0])
        return jax.value_and_grad(lambda rows: jnp.sum(sg.all_gather(rows) * scale))(rows)

    np.testing.assert_array_equal(sg.all_gather(np.ones((2, 3)), axis=1), np.ones((2, 3)))
    values, gradients = strategy.run(step, args=(rows,))
    assert [float(value) for value in strategy.local_results(values)] == [621.0, 621.0]
    np.testing.assert_array_equal(strategy.gather(gradients, axis=0), [2.0, 20.0, 200.0])


def test_cross_replica_context_is_refused() -> None:
    with (
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
        pytest.raises(RuntimeError, match=r"cross-replica.*\n.*\nFix: use strategy.gather"),
    ):
        sg.all_gather(np.ones(2))
