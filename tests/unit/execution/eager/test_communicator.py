"""Collectives of eager replicas, of all of them and of groups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution import eager as meeting
from stratagem.execution.eager import asked_by_all, self_transposed
from stratagem.options import ReduceOp

GROUPS = ((0, 2), (1, 3))
VALUES = np.array([[1.0], [2.0], [3.0], [5.0]], "float32")


@pytest.fixture
def strategy():
    sg.config.run_eagerly(True)
    yield sg.MirroredStrategy([f"cpu:{index}" for index in range(4)])
    sg.config.run_eagerly(False)


def _gradient_of_gather(group, value):
    weights = jnp.array([1.0, 10.0])
    return jax.grad(lambda x: jnp.sum(weights * group.all_gather(x, 0, None)))(value)


_ALONE = ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("groups", "function", "expected"),
    [
        (GROUPS, lambda group, x: group.all_reduce(ReduceOp.SUM, x), [[4.0], [7.0], [4.0], [7.0]]),
        (GROUPS, lambda group, x: group.all_reduce(ReduceOp.MEAN, x), [[2.0], [3.5], [2.0], [3.5]]),
        (GROUPS, lambda group, x: group.all_gather(x, 0, None), [[1, 3], [2, 5], [1, 3], [2, 5]]),
        (GROUPS, _gradient_of_gather, [[2.0], [2.0], [20.0], [20.0]]),
        (
            GROUPS,
            lambda group, x: group.all_to_all(jnp.stack([x, 10 * x]))[:, 0],
            [[1, 3], [2, 5], [10, 30], [20, 50]],
        ),
        (_ALONE, lambda group, x: group.all_reduce(ReduceOp.SUM, x) * group.num_replicas, VALUES),
    ],
    ids=["sum", "mean", "gather", "gradient of a gather", "exchange", "alone"],
)
def test_collectives_are_those_of_the_group(strategy, groups, function, expected) -> None:
    def step(value):
        return function(sg.get_replica_context().communicator.among(groups), value)

    found = strategy.run(step, args=(sg.PerReplica(stacked=VALUES),))
    np.testing.assert_array_equal(np.stack(strategy.local_results(found)), expected)


# Requests of eager replicas in two processes, put together in the order of the replicas.


class Group:
    """A group of two; this process is the second, and `first` is what the first sent."""

    def __init__(self, first: Any) -> None:
        self.first = first

    def exchange(self, name: str, own: Any) -> list[Any]:
        return [self.first, own]


def test_values_of_all_replicas_have_the_structure_of_the_own_ones(monkeypatch) -> None:
    first = [("sum", [np.array(1.0), np.array([2.0])]), ("sum", [np.array(3.0), np.array([4.0])])]
    monkeypatch.setattr(meeting, "current_group", lambda: Group(first))
    own = [{"a": jnp.array(5.0), "b": [jnp.array([6.0]), "text"]}]
    kinds, values = asked_by_all(["sum"], own)
    assert kinds == ["sum"] * 3
    assert [value["b"][1] for value in values] == ["text"] * 3
    assert [float(value["a"]) for value in values] == [1, 3, 5]
    assert [float(value["b"][0][0]) for value in values] == [2, 4, 6]


def test_calls_that_differ_give_no_values(monkeypatch) -> None:
    monkeypatch.setattr(meeting, "current_group", lambda: Group([("gather", [np.array(1.0)])]))
    assert asked_by_all(["sum"], [jnp.ones(())]) == (["gather", "sum"], [])


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_gradient_of_a_reduction_is_the_reduction_of_the_cotangent(factor) -> None:
    reduce = self_transposed(lambda value: jnp.asarray(value) * factor)
    np.testing.assert_allclose(reduce(jnp.ones(3)), np.full(3, factor))
    gradient = jax.grad(lambda x: jnp.sum(reduce(x) * jnp.arange(3.0)))(jnp.ones(3))
    np.testing.assert_allclose(gradient, factor * np.arange(3.0))
