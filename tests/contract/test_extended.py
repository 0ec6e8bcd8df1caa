"""`strategy.extended`: what authors of optimizers, layers and metrics build on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, replica_ids, split


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return sg.Variable(1.0, name="weight")


def test_reduce_to_gives_a_mirrored_value(strategy, variable) -> None:
    n = strategy.num_replicas_in_sync
    value = split(strategy, lambda i: jnp.array([i + 1.0, 2.0]))
    device = jax.devices()[0]
    for destination in (variable, value, device):
        total = strategy.extended.reduce_to("sum", value, destination)
        assert isinstance(total, sg.Mirrored)
        np.testing.assert_allclose(np.asarray(total), [n * (n + 1) / 2, 2.0 * n])
    mean = strategy.extended.reduce_to(sg.ReduceOp.MEAN, value, variable)
    np.testing.assert_allclose(jnp.asarray(mean), [(n + 1) / 2, 2.0])


def test_mirrored_value_reads_as_an_array_or_a_number(strategy, variable) -> None:
    mean = strategy.extended.reduce_to(
        "mean", split(strategy, lambda _: jnp.float32(3.0)), variable
    )
    assert (float(mean), int(mean)) == (3.0, 3)
    assert float(jnp.sin(mean)) == float(jnp.sin(3.0))
    np.testing.assert_array_equal(np.asarray(mean), 3.0)


@pytest.mark.parametrize("destinations", [[], ["cpu:0"], ()], ids=repr)
def test_list_as_destination_is_refused(strategy, destinations) -> None:
    value = split(strategy, lambda i: jnp.float32(i))
    with pytest.raises(ValueError, match=r"received destinations of type (list|tuple)"):
        strategy.extended.reduce_to("sum", value, destinations)
    with pytest.raises(ValueError, match="reduce_to received destinations of type"):
        strategy.extended.batch_reduce_to("sum", [(value, destinations)])


def test_unknown_op_is_refused(strategy, variable) -> None:
    value = split(strategy, lambda i: jnp.float32(i))
    with pytest.raises(ValueError, match="reduce_op='max' is not a reduction"):
        strategy.extended.reduce_to("max", value, variable)
    with pytest.raises(ValueError, match="reduce_op='max' is not a reduction"):
        strategy.extended.batch_reduce_to("max", [(value, variable)])


def test_batch_reduce_to_keeps_the_order_of_the_pairs(strategy, variable) -> None:
    n = strategy.num_replicas_in_sync
    pairs = [
        (split(strategy, lambda i, k=k: jnp.float32(k * (i + 1))), variable) for k in (1, 2, 3)
    ]
    results = strategy.extended.batch_reduce_to("sum", pairs)
    assert all(isinstance(result, sg.Mirrored) for result in results)
    assert [float(result) for result in results] == [k * n * (n + 1) / 2 for k in (1, 2, 3)]


def test_broadcast_to_gives_every_replica_the_same(strategy, variable, execution) -> None:
    value = strategy.extended.broadcast_to(jnp.array([1.0, 2.0]), variable)
    assert isinstance(value, sg.Mirrored)
    assert_parts(strategy, strategy.run(lambda x: x, args=(value,)), lambda _: [1.0, 2.0])


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_update_applies_the_function_to_every_copy(strategy, execution, aggregation) -> None:
    """v = 1 and assign_add(3) give 4 on every copy, whatever the aggregation."""
    with strategy.scope():
        variable = sg.Variable(1.0, aggregation=aggregation)
    result = strategy.extended.update(variable, lambda c, x: c.assign_add(x), args=(3.0,))
    assert float(result) == 4.0
    assert_parts(strategy, strategy.run(lambda: variable.value), lambda _: 4.0)
    mirrored = strategy.extended.broadcast_to(jnp.float32(2.0), variable)
    strategy.extended.update(
        variable, lambda c, x, scale: c.assign(x * scale), (mirrored,), {"scale": mirrored}
    )
    assert_parts(strategy, strategy.run(lambda: variable.value), lambda _: 4.0)
    assert float(variable.value) == 4.0


def test_update_without_grouping_gives_one_result_a_copy(strategy, variable) -> None:
    results = strategy.extended.update(
        variable, lambda c, x: c.assign_add(x), args=(3.0,), group=False
    )
    assert isinstance(results, tuple)
    has_one_copy = isinstance(strategy, sg.CentralStorageStrategy)
    num_copies = 1 if has_one_copy else len(replica_ids(strategy))
    assert [float(result) for result in results] == [4.0] * num_copies
    assert float(variable.value) == 4.0


def test_update_refuses_a_per_replica_argument(distributing) -> None:
    with distributing.scope():
        variable = sg.Variable(1.0)
    value = split(distributing, lambda i: jnp.float32(i))
    for arguments in [{"args": (value,)}, {"args": ([value],)}, {"kwargs": {"x": value}}]:
        with pytest.raises(TypeError, match=r"(?s)received a PerReplica argument.*reduce_to"):
            distributing.extended.update(variable, lambda c, x: c.assign(x), **arguments)
    with pytest.raises(TypeError, match="received a PerReplica argument"):
        distributing.run(
            lambda: sg.get_replica_context().merge_call(
                lambda s, v: s.extended.update(variable, lambda c, x: c.assign(x), args=(v,)),
                args=(contribution(),),
            )
        )
    assert float(variable.value) == 1.0


def test_exception_in_the_updating_function_comes_out_and_leaves_its_context(
    strategy, variable
) -> None:
    def fail(_):
        raise LookupError("in the update")

    with pytest.raises(LookupError, match="in the update"):
        strategy.extended.update(variable, fail)
    assert not sg.in_cross_replica_context()


def test_variables_made_beside_another_belong_to_its_strategy(strategy, variable) -> None:
    with strategy.extended.colocate_vars_with(variable):
        slot = sg.Variable(0.0)
    assert strategy.extended.variable_created_in_scope(slot)
    assert not sg.has_strategy()


def test_variable_of_another_strategy_has_nothing_beside_it_here(strategy, foreign) -> None:
    with foreign.scope():
        other = sg.Variable(1.0)
    with (
        pytest.raises(ValueError, match="does not belong to"),
        strategy.extended.colocate_vars_with(other),
    ):
        pytest.fail("the block must not be entered")


def test_a_variable_belongs_to_the_strategy_of_its_scope(strategy, foreign, variable) -> None:
    default = sg.get_strategy()
    plain = sg.Variable(1.0)
    with foreign.scope():
        other = sg.Variable(1.0)
    belongs = strategy.extended.variable_created_in_scope
    assert belongs(variable)
    assert not belongs(other)
    assert belongs(plain) == (strategy is default)
    assert default.extended.variable_created_in_scope(plain)
    assert foreign.extended.variable_created_in_scope(other)
    assert not foreign.extended.variable_created_in_scope(variable)


@pytest.mark.parametrize("what", [1.0, "v", None, np.ones(2)], ids=lambda v: type(v).__name__)
def test_what_is_no_variable_belongs_to_nobody(strategy, what) -> None:
    with pytest.raises(TypeError, match="variable_created_in_scope received"):
        strategy.extended.variable_created_in_scope(what)


def test_value_container_is_the_object_of_all_copies(strategy, variable) -> None:
    assert strategy.extended.value_container(variable) is variable
    assert strategy.extended.value_container(3) == 3
    containers = []
    strategy.extended.update(
        variable, lambda c: containers.append(strategy.extended.value_container(c))
    )
    assert containers[0] is variable


def test_static_shapes_are_required(strategy) -> None:
    assert strategy.extended.experimental_require_static_shapes is True
