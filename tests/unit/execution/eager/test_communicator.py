"""Collectives of eager replicas, of all of them and of groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.options import ReduceOp

GROUPS = ((0, 2), (1, 3))
VALUES = np.array([[1.0], [2.0], [3.0], [5.0]], "float32")


@pytest.fixture
def strategy():
    sg.config.run_eagerly(True)
    yield sg.MirroredStrategy([f"cpu:{index}" for index in range(4)])
    sg.config.run_eagerly(False)


def results(strategy, function):
    """Returns what a function of this replica's group makes of its value, for each replica."""

    def step(value):
        return function(sg.get_replica_context().communicator.among(GROUPS), value)

    given = sg.PerReplica(stacked=VALUES)
    found = strategy.run(step, args=(given,))
    return [np.asarray(one).tolist() for one in strategy.local_results(found)]


def test_sums_are_those_of_the_group(strategy) -> None:
    sums = results(strategy, lambda group, value: group.all_reduce(ReduceOp.SUM, value))
    assert sums == [[4.0], [7.0], [4.0], [7.0]]
    means = results(strategy, lambda group, value: group.all_reduce(ReduceOp.MEAN, value))
    assert means == [[2.0], [3.5], [2.0], [3.5]]


def test_gathers_are_those_of_the_group(strategy) -> None:
    found = results(strategy, lambda group, value: group.all_gather(value, 0, None))
    assert found == [[1.0, 3.0], [2.0, 5.0], [1.0, 3.0], [2.0, 5.0]]


def test_gradient_of_a_gather_is_summed_over_the_group(strategy) -> None:
    def function(group, value):
        weights = jnp.array([1.0, 10.0])
        return jax.grad(lambda x: jnp.sum(weights * group.all_gather(x, 0, None)))(value)

    assert results(strategy, function) == [[2.0], [2.0], [20.0], [20.0]]


def test_rows_are_exchanged_in_the_group(strategy) -> None:
    def function(group, value):
        return group.all_to_all(jnp.stack([value, 10 * value]))[:, 0]

    assert results(strategy, function) == [[1.0, 3.0], [2.0, 5.0], [10.0, 30.0], [20.0, 50.0]]


def test_group_of_one_replica_combines_nothing(strategy) -> None:
    def step(value):
        own = sg.get_replica_context().communicator.among(((0,), (1,), (2,), (3,)))
        return own.all_reduce(ReduceOp.SUM, value) * own.num_replicas

    found = strategy.run(step, args=(sg.PerReplica(stacked=VALUES),))
    np.testing.assert_array_equal(np.stack(strategy.local_results(found)), VALUES)
