"""Variables among the results of a step: their values at its end, in every container."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, seldom_eager

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Record:
    """A dataclass that JAX does not know."""

    count: Any
    name: str


class Keeper(keras.layers.Layer):
    """A layer whose list of variables is a subclass of list."""

    def __init__(self, variable: Any) -> None:
        super().__init__()
        self.kept = [variable]


def test_returned_variables_are_values_at_the_end_of_the_step(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        count = sg.Variable(1.0, aggregation="mean")
        own = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
        read = sg.Variable(5.0)
    keeper = Keeper(count)

    def step() -> Any:
        early = count + 0.0
        results = [early, count, {"own": own}, Pair(count, (read, read)), Record(count, "c")]
        count.assign_add(2.0)
        own.assign_add(contribution())
        return [*results, keeper.kept, Record(Pair(own, None), "nested"), count]

    for number in range(3):
        early, bare, in_dict, pair, record, kept, nested, again = strategy.run(step)
        end = 3.0 + 2.0 * number
        assert_parts(strategy, early, lambda _, end=end: end - 2.0)
        ends = (bare, pair.first, record.count, kept[0], again)
        for parts in ends:
            assert_parts(strategy, parts, lambda _, end=end: end)
        for parts in (in_dict["own"], nested.count.first):
            assert_parts(strategy, parts, lambda i, k=number + 1: k * (i + 1.0))
        for parts in pair.second:
            assert_parts(strategy, parts, lambda _, k=number: 5.0 + 10.0 * k)
        assert (record.name, type(nested), nested.count.second) == ("c", Record, None)
        read.assign_add(10.0)
    np.testing.assert_allclose(count.value, 7.0)
    np.testing.assert_allclose(own.value, 3 * sum(range(n + 1)))
    assert not any(isinstance(parts, keras.Variable) for parts in ends)
    for parts in ends:  # what was returned stays, whatever later steps do
        assert_parts(strategy, parts, lambda _: 7.0)


@seldom_eager
def test_optimizer_and_metric_state_is_returned_as_the_step_leaves_it(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = sg.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        optimizer.build([weight])
        mean = keras.metrics.Mean()

    def step() -> Any:
        loss, grads = sg.value_and_grad(lambda: jnp.sum(weight * 1.0), [weight])
        mean.update_state(contribution())
        iterations = optimizer.apply_gradients(zip(grads, [weight], strict=True))
        return iterations, optimizer.iterations, weight, mean.variables, loss

    velocity, expected = 0.0, 0.0
    for number in range(1, 4):
        iterations, same, weights, (total, count), loss = strategy.run(step)
        before = expected
        velocity = 0.5 * velocity - 0.5 * n
        expected += velocity
        assert_parts(strategy, same, lambda _, k=number: k)
        if iterations is not None:  # Keras's apply_gradients returns it, ours on servers nothing
            assert_parts(strategy, iterations, lambda _, k=number: k)
        assert_parts(strategy, weights, lambda _, end=expected: [end, end])
        assert_parts(strategy, total, lambda i, k=number: k * (i + 1.0))
        assert_parts(strategy, count, lambda _, k=number: k)
        assert_parts(strategy, loss, lambda _, start=before: 2 * start)


def test_function_returns_values_of_variables(strategy, execution) -> None:
    with strategy.scope():
        count = sg.Variable(1.0, aggregation="mean")

    @sg.function
    def steps() -> Any:
        parts = strategy.run(lambda: (count.assign_add(1.0), count)[1])
        count.assign_add(1.0)
        return Record(count, "c"), parts

    for end in (3.0, 5.0):
        record, parts = steps()
        count.assign_add(0.0)
        np.testing.assert_allclose(record.count, end)
        assert_parts(strategy, parts, lambda _, end=end: end - 1.0)
    count.assign(0.0)
    np.testing.assert_allclose(record.count, 5.0)


@seldom_eager
def test_steps_return_the_values_after_each_of_them(strategy, execution) -> None:
    with strategy.scope():
        count = sg.Variable(0.0, aggregation="mean")

    def step(batch: Any) -> Any:
        count.assign_add(1.0)
        return Record(count, "c"), jnp.sum(batch)

    iterator = iter(strategy.distribute_dataset([np.ones(8, "float32")] * 4))
    record, _ = strategy.run_steps(step, iterator, 3)
    assert_parts(strategy, record.count, lambda _: [1.0, 2.0, 3.0])
    record, _ = strategy.run_steps(step, iterator, 3)
    assert_parts(strategy, record.count, lambda _: [4.0])


def test_variable_made_in_the_step_is_returned(strategy, execution) -> None:
    made: list[Any] = []

    def step() -> Any:
        if not made:
            made.append(sg.Variable(3.0, aggregation="mean"))
        made[0].assign_add(1.0)
        return made

    with strategy.scope():
        for end in (4.0, 5.0):
            (parts,) = strategy.run(step)
            assert_parts(strategy, parts, lambda _, end=end: end)


def test_value_of_a_variable_in_a_sum_is_that_of_its_time(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        count = sg.Variable(1.0, aggregation="mean")

    def step() -> Any:
        total = sg.get_replica_context().all_reduce("sum", count)
        count.assign_add(1.0)
        value, (gradient,) = sg.value_and_grad(lambda: count, [count])
        return total, value, gradient

    total, value, gradient = strategy.run(step)
    assert_parts(strategy, total, lambda _: float(n))
    assert_parts(strategy, value, lambda _: 2.0)
    assert_parts(strategy, gradient, lambda _: 1.0)
