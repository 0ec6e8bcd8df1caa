"""Steps whose sums go through shared memory, between devices of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.all_reduce import Algorithm, ReplicaAxis
from stratagem.devices.shared_sums import is_supported
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.programs import lockstep
from stratagem.strategies.cross_device_ops import AutomaticOps
from tests.unit.devices.sharing import served

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is shared on Linux on x86-64")


class SharedOps(AutomaticOps):
    def communicator(self, topology):
        return MeshCommunicator(ReplicaAxis.of(topology), Algorithm.SHARED_MEMORY)


@pytest.fixture
def strategy(monkeypatch) -> Iterator[Any]:
    """A strategy of two replicas whose sums are all in shared memory."""
    monkeypatch.setattr(lockstep, "is_connected", lambda topology: topology.num_replicas == 2)
    with served(2):
        yield sg.MirroredStrategy(["cpu:0", "cpu:1"], SharedOps())


def are_ordered(strategy: Any) -> list[bool]:
    return [program.step.is_ordered for program in strategy.executor.programs]


def add(values: Any) -> list[Any]:
    return [sg.get_replica_context().all_reduce("SUM", value) for value in values]


def values_of(strategy: Any) -> tuple[list[Any], list[Any]]:
    """Distributed values, and their sums over replicas."""
    parts = np.random.default_rng(0).integers(0, 100, (6, 2, 50_000)).astype("float32")
    values = [
        strategy.distribute_values_from_function(
            lambda context, of=of: of[context.replica_id_in_sync_group]
        )
        for of in parts
    ]
    return values, list(parts.sum(axis=1))


def check(strategy: Any, results: Any, expected: Any) -> None:
    for result, total in zip(results, expected, strict=True):
        for part in strategy.local_results(result):
            np.testing.assert_array_equal(part, total)


def test_sums_of_a_step(strategy) -> None:
    values, expected = values_of(strategy)
    for _ in range(3):
        check(strategy, strategy.run(add, args=(values,)), expected)
    assert are_ordered(strategy) == [True]


def test_a_step_without_sums_is_an_ordinary_program(strategy) -> None:
    values, _ = values_of(strategy)
    strategy.run(lambda value: value * 2, args=(values[0],))
    assert are_ordered(strategy) == [False]


def test_sums_of_many_steps_and_the_variables_that_they_write(strategy) -> None:
    with strategy.scope():
        total = sg.Variable(np.zeros(100, "float32"))

    def accumulate(batch: Any) -> Any:
        context = sg.get_replica_context()
        total.assign(total.value + context.all_reduce("MEAN", batch + jnp.zeros(100)))
        return context.all_reduce("SUM", jnp.ones(2))[0]

    data = strategy.distribute_dataset(
        sg.input.Dataset(np.arange(16, dtype="float32"), batch_size=2)
    )
    counts = strategy.run_steps(accumulate, iter(data), 8)
    np.testing.assert_array_equal(total.numpy(), np.full(100, np.arange(16).sum() / 2))
    for part in strategy.local_results(counts):
        np.testing.assert_array_equal(part, np.full(8, 2.0))
    assert any(are_ordered(strategy))


def test_within_a_program_of_the_users_no_order_is_assumed(strategy) -> None:
    values, expected = values_of(strategy)

    @jax.jit
    def twice(values: Any) -> Any:
        return strategy.run(add, args=(values,)), strategy.run(add, args=(values,))

    for results in twice(values):
        check(strategy, results, expected)
    check(strategy, strategy.run(add, args=(values,)), expected)
    assert are_ordered(strategy).count(True) == 1
