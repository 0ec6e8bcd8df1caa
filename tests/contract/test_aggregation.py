"""What replicas' assignments do to a variable: the aggregation table, with its numbers.

A variable starts at 10 and replica i contributes i + 1. What is stated for two replicas is written
down here; for n replicas it follows.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, replica_id, split

AGGREGATIONS = ("sum", "mean", "only_first_replica")
METHODS = ("assign", "assign_add", "assign_sub")
STATED_FOR_TWO = {
    ("assign", "sum"): 3.0,
    ("assign", "mean"): 1.5,
    ("assign", "only_first_replica"): 1.0,
    ("assign_add", "sum"): 13.0,
    ("assign_add", "mean"): 11.5,
    ("assign_add", "only_first_replica"): 11.0,
    ("assign_sub", "sum"): 7.0,
    ("assign_sub", "mean"): 8.5,
    ("assign_sub", "only_first_replica"): 9.0,
}
STATED_ON_READ_FOR_TWO = {"sum": 23.0, "mean": 11.5, "only_first_replica": 11.0}


def aggregated(aggregation: str, n: int) -> float:
    return {"sum": n * (n + 1) / 2, "mean": (n + 1) / 2, "only_first_replica": 1.0}[aggregation]


def on_write(n: int) -> dict[tuple[str, str], float]:
    table = {}
    for aggregation in AGGREGATIONS:
        delta = aggregated(aggregation, n)
        results = (delta, 10 + delta, 10 - delta)
        table.update({(m, aggregation): r for m, r in zip(METHODS, results, strict=True)})
    return table


def on_read(n: int) -> dict[str, float]:
    """After assign_add, component i is 11 + i."""
    return {"sum": 10.0 * n + n * (n + 1) / 2, "mean": 10 + (n + 1) / 2, "only_first_replica": 11.0}


@pytest.mark.compatibility
def test_the_tables_for_two_replicas_are_the_stated_ones() -> None:
    assert on_write(2) == STATED_FOR_TWO
    assert on_read(2) == STATED_ON_READ_FOR_TWO


@pytest.mark.compatibility
@pytest.mark.parametrize("synchronization", ["auto", "on_write"])
def test_on_write_table(strategy, execution, synchronization) -> None:
    with strategy.scope():
        variables = {
            key: sg.Variable(10.0, synchronization=synchronization, aggregation=key[1])
            for key in STATED_FOR_TWO
        }

    def step():
        for (method, _), variable in variables.items():
            getattr(variable, method)(contribution())
        return {key: variable.value for key, variable in variables.items()}

    seen_in_replicas = strategy.run(step)
    expected = on_write(strategy.num_replicas_in_sync)
    assert {key: float(variable.value) for key, variable in variables.items()} == expected
    copies = strategy.run(lambda: {key: variable.value for key, variable in variables.items()})
    for key, number in expected.items():
        assert_parts(strategy, seen_in_replicas[key], lambda _, number=number: number)
        assert_parts(strategy, copies[key], lambda _, number=number: number)


@pytest.mark.compatibility
def test_on_read_table(strategy, execution) -> None:
    with strategy.scope():
        variables = {
            name: sg.Variable(10.0, synchronization="on_read", aggregation=name)
            for name in ("none", *AGGREGATIONS)
        }

    def step():
        for variable in variables.values():
            variable.assign_add(contribution())
        return {name: variable.value for name, variable in variables.items()}

    for name, parts in strategy.run(step).items():
        assert_parts(strategy, parts, lambda i: 11.0 + i)
        if name != "none":
            expected = on_read(strategy.num_replicas_in_sync)[name]
            np.testing.assert_allclose(variables[name].value, expected, rtol=1e-6)
            np.testing.assert_allclose(np.asarray(variables[name]), expected, rtol=1e-6)


@pytest.mark.compatibility
def test_on_read_assign_and_assign_sub_touch_only_this_component(strategy, execution) -> None:
    with strategy.scope():
        assigned = sg.Variable([10.0, 10.0], synchronization="on_read", aggregation="sum")
        lowered = sg.Variable([10.0, 10.0], synchronization="on_read", aggregation="mean")

    def step():
        assigned.assign(jnp.full(2, contribution()))
        lowered.assign_sub(jnp.full(2, contribution()))
        return assigned.value, lowered.value

    first, second = strategy.run(step)
    assert_parts(strategy, first, lambda i: np.full(2, i + 1.0))
    assert_parts(strategy, second, lambda i: np.full(2, 9.0 - i))
    n = strategy.num_replicas_in_sync
    np.testing.assert_allclose(assigned.value, np.full(2, n * (n + 1) / 2))
    np.testing.assert_allclose(lowered.value, np.full(2, 10 - (n + 1) / 2))


@pytest.mark.compatibility
def test_on_read_without_aggregation_cannot_be_read_outside(distributing) -> None:
    with distributing.scope():
        variable = sg.Variable(10.0, synchronization="on_read")
        with pytest.raises(ValueError, match="aggregation NONE, but was read in cross-replica"):
            _ = variable.value
    with pytest.raises(ValueError, match="ON_READ with aggregation NONE"):
        np.asarray(variable)


@pytest.mark.compatibility
@pytest.mark.parametrize("method", METHODS)
def test_assignment_without_aggregation_that_may_differ_is_refused(
    distributing, execution, method
) -> None:
    with distributing.scope():
        variable = sg.Variable(10.0, name="drifting")
    fixes = r"aggregation=.*on_read.*extended\.update"
    words = rf"(?s)assigned variable '.*drifting', whose aggregation is NONE.*{fixes}"
    with pytest.raises(ValueError, match=words):
        distributing.run(lambda: getattr(variable, method)(contribution()))
    assert_parts(distributing, distributing.run(lambda: variable.value), lambda _: 10.0)


@pytest.mark.compatibility
@pytest.mark.parametrize("method", METHODS)
def test_assignment_without_aggregation_on_one_replica_is_plain(sole, execution, method) -> None:
    with sole.scope():
        variable = sg.Variable(10.0)
    sole.run(lambda: getattr(variable, method)(contribution()))
    assert float(variable.value) == {"assign": 1.0, "assign_add": 11.0, "assign_sub": 9.0}[method]


@pytest.mark.compatibility
def test_assignment_without_aggregation_of_the_same_value_passes(strategy, execution) -> None:
    """From a shared argument, the variable itself, a constant, and a sum over replicas."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [sg.Variable(10.0) for _ in range(4)]

    def step(shared):
        variables[0].assign(shared)
        variables[1].assign_add(variables[1] * jnp.float32(2.0))
        variables[2].assign_sub(1.0)
        variables[3].assign(sg.get_replica_context().all_reduce("sum", contribution()))

    strategy.run(step, args=(jnp.float32(5.0),))
    got = [float(variable.value) for variable in variables]
    assert got == [5.0, 30.0, 9.0, n * (n + 1) / 2]


@pytest.mark.compatibility
def test_last_of_several_assignments_counts(strategy, execution) -> None:
    """SUM aggregates each assignment; NONE is judged by what is written in the end."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total, plain = sg.Variable(10.0, aggregation="sum"), sg.Variable(10.0)

    def step():
        total.assign(contribution())
        total.assign_add(contribution())
        total.assign_sub(jnp.float32(1.0))
        plain.assign(jnp.float32(3.0))
        plain.assign_add(jnp.float32(1.0))

    strategy.run(step)
    assert float(total.value) == n * (n + 1) - n
    assert float(plain.value) == 4.0


@pytest.mark.compatibility
def test_python_number_to_a_sum_variable_is_refused(distributing, execution) -> None:
    with distributing.scope():
        variable = sg.Variable(10.0, aggregation="sum", name="total")
    for method in METHODS:
        with pytest.raises(
            ValueError, match=r"Python number 1\.0 to '.*total', whose aggregation is SUM"
        ):
            distributing.run(lambda method=method: getattr(variable, method)(1.0))
    distributing.run(lambda: variable.assign_add(np.float32(1.0)))
    assert float(variable.value) == 10.0 + distributing.num_replicas_in_sync


@pytest.mark.compatibility
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_python_number_is_clear_where_replicas_do_not_add_up(
    strategy, execution, aggregation
) -> None:
    with strategy.scope():
        variable = sg.Variable(10.0, aggregation=aggregation)
    strategy.run(lambda: variable.assign_add(1.0))
    assert float(variable.value) == 11.0


@pytest.mark.compatibility
def test_integers_are_summed_and_taken_from_the_first_replica(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total = sg.Variable(10, dtype="int32", aggregation="sum")
        first = sg.Variable(10, dtype="uint8", aggregation="only_first_replica")

    def step():
        total.assign_add(contribution("int32"))
        first.assign(contribution("uint8"))

    strategy.run(step)
    assert (int(total.value), int(first.value)) == (10 + n * (n + 1) // 2, 1)
    assert (total.value.dtype, first.value.dtype) == (jnp.int32, jnp.uint8)


@pytest.mark.compatibility
def test_only_first_replica_ignores_what_others_hold(distributing, execution) -> None:
    """Not a number on the others must not reach the variable."""
    with distributing.scope():
        variable = sg.Variable(10.0, aggregation="only_first_replica")

    def step():
        variable.assign(jnp.where(replica_id() == 0, jnp.float32(4.0), jnp.float32(np.nan)))

    distributing.run(step)
    assert float(variable.value) == 4.0


@pytest.mark.compatibility
def test_per_replica_assigned_in_a_replica_is_refused(distributing, execution) -> None:
    with distributing.scope():
        variables = [
            sg.Variable(10.0, aggregation="sum"),
            sg.Variable(10.0),
            sg.Variable(10.0, synchronization="on_read", aggregation="mean"),
        ]
    value = split(distributing, lambda i: jnp.float32(i))
    for variable in variables:
        for method in METHODS:
            with pytest.raises(
                TypeError, match=r"A PerReplica was assigned to .* in a replica function"
            ):
                distributing.run(lambda v=variable, m=method: getattr(v, m)(value))


@pytest.mark.compatibility
@pytest.mark.parametrize("method", METHODS)
def test_per_replica_assigned_outside_is_aggregated(distributing, method) -> None:
    n = distributing.num_replicas_in_sync
    value = split(distributing, lambda i: jnp.float32(i + 1))
    with distributing.scope():
        for aggregation in AGGREGATIONS:
            variable = sg.Variable(10.0, aggregation=aggregation)
            getattr(variable, method)(value)
            np.testing.assert_allclose(variable.value, on_write(n)[method, aggregation])
        with pytest.raises(
            TypeError, match=r"PerReplica was assigned to .* whose aggregation is NONE"
        ):
            getattr(sg.Variable(10.0), method)(value)
