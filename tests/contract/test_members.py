"""Members that every strategy has, and copying."""

from __future__ import annotations

import copy
import gc
import weakref

import jax.numpy as jnp
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, replica_ids, seldom_eager
from tests.contract.rows import ROWS


@pytest.mark.parametrize("name", ROWS)
def test_number_of_replicas(name) -> None:
    with ROWS[name].made() as strategy:
        assert strategy.num_replicas_in_sync == ROWS[name].num_replicas
        assert isinstance(strategy.num_replicas_in_sync, int)


def test_strategy_is_a_strategy_and_says_its_name_and_devices(strategy) -> None:
    assert isinstance(strategy, sg.Strategy)
    assert isinstance(strategy.extended, sg.StrategyExtended)
    assert strategy.extended is strategy.extended
    assert type(strategy).__name__ in repr(strategy)
    for device in strategy.topology.all_devices or ():
        assert str(device) in repr(strategy)


def test_deep_copy_is_another_strategy_on_the_same_devices(copyable, execution) -> None:
    strategy = copyable
    copied = copy.deepcopy(strategy)
    assert copied is not strategy
    assert type(copied) is type(strategy)
    assert copied.topology.devices == strategy.topology.devices
    assert copied.num_replicas_in_sync == strategy.num_replicas_in_sync
    assert_parts(copied, copied.run(contribution), lambda i: i + 1)
    if strategy is sg.get_strategy():
        return
    with copied.scope():
        own = sg.Variable(1.0)
    assert copied.extended.variable_created_in_scope(own)
    assert not strategy.extended.variable_created_in_scope(own)
    with copied.scope(), pytest.raises(RuntimeError, match="inside the scope of"):
        strategy.run(lambda: 1)


def test_deep_copy_of_what_holds_the_strategy_twice_copies_it_once(copyable) -> None:
    holder = copy.deepcopy({"a": copyable, "b": [copyable]})
    assert holder["a"] is holder["b"][0]


def test_deep_copy_of_a_cluster_is_refused(strategy) -> None:
    if strategy.topology.spans_processes or strategy.placement.remote is not None:
        with pytest.raises(ValueError, match=r"(?s)was passed to copy\.deepcopy.*one strategy"):
            copy.deepcopy(strategy)
    else:
        assert copy.deepcopy(strategy) is not None


def test_shallow_copy_is_refused(strategy) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)was passed to copy\.copy.*copy\.deepcopy"):
        copy.copy(strategy)


def test_variables_that_nobody_holds_are_forgotten(strategy) -> None:
    with strategy.scope():
        variable = sg.Variable(jnp.ones(3))
    reference = weakref.ref(variable)
    del variable
    gc.collect()
    assert reference() is None


@seldom_eager
def test_same_program_for_every_replica_of_this_process(strategy, execution) -> None:
    """What runs once a replica and what runs once give the same: eager and compiled agree."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = sg.Variable([1.0, -2.0], aggregation="mean")

    def step(x):
        context = sg.get_replica_context()
        value, (gradient,) = sg.value_and_grad(
            lambda: jnp.sum(jnp.tanh(x * weight.value)) * contribution(), [weight]
        )
        gradient = context.all_reduce("sum", gradient)
        weight.assign_sub(0.1 * gradient)
        return context.all_gather(value[None], axis=0), weight.value

    gathered, after = strategy.run(step, args=(jnp.array([0.5, 0.25]),))
    tanh = jnp.tanh(jnp.array([0.5, -0.5]))
    slope = jnp.array([0.5, 0.25]) * (1 - tanh**2) * n * (n + 1) / 2
    assert_parts(strategy, gathered, lambda _: jnp.sum(tanh) * jnp.arange(1.0, n + 1))
    for part in strategy.local_results(after):
        assert jnp.allclose(part, jnp.array([1.0, -2.0]) - 0.1 * slope, rtol=1e-5)
    assert len(strategy.local_results(after)) == len(replica_ids(strategy))
