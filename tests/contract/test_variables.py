"""How variables are made and kept, and what assignments outside the replicas do to them."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution

AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")


def test_assignment_outside_goes_to_every_copy_whatever_the_aggregation(
    strategy, execution
) -> None:
    with strategy.scope():
        variables = [sg.Variable(10.0, aggregation=name) for name in AGGREGATIONS]
        for variable in variables:
            variable.assign_add(1.0)
    for parts in strategy.run(lambda: [variable.value for variable in variables]):
        assert_parts(strategy, parts, lambda _: 11.0)
    for variable in variables:
        variable.assign(np.float32(5.0))
        variable.assign_sub(jnp.float32(2.0))
    for parts in strategy.run(lambda: [variable.value for variable in variables]):
        assert_parts(strategy, parts, lambda _: 3.0)
    assert [float(variable.value) for variable in variables] == [3.0] * 4


def test_mirrored_variable_reads_as_one_array_outside_every_scope(strategy) -> None:
    with strategy.scope():
        variable = sg.Variable(np.arange(3.0, dtype="float32"))
    np.testing.assert_array_equal(variable.value, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(np.asarray(variable), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(variable + jnp.ones(3), [1.0, 2.0, 3.0])
    assert variable.value.shape == (3,)


def test_on_read_assigned_outside_sets_the_components(strategy, execution) -> None:
    """`assign(4)` of SUM with two replicas gives [2 | 2]."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = {
            name: sg.Variable(1.0, synchronization="on_read", aggregation=name)
            for name in AGGREGATIONS[1:]
        }
        for variable in variables.values():
            variable.assign(4.0)
    parts = strategy.run(lambda: {name: variable.value for name, variable in variables.items()})
    assert_parts(strategy, parts["sum"], lambda _: 4.0 / n)
    assert_parts(strategy, parts["mean"], lambda _: 4.0)
    assert_parts(strategy, parts["only_first_replica"], lambda _: 4.0)
    assert [float(variable.value) for variable in variables.values()] == [4.0] * 3


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_on_read_delta_outside_is_refused_for_sum(distributing, method) -> None:
    with distributing.scope():
        total = sg.Variable(1.0, synchronization="on_read", aggregation="sum", name="total")
        with pytest.raises(
            ValueError, match=f"{method} was called in cross-replica context on '.*total'"
        ):
            getattr(total, method)(2.0)
    np.testing.assert_allclose(total.value, distributing.num_replicas_in_sync)


def test_on_read_delta_outside_is_applied_to_each_component(strategy, execution) -> None:
    with strategy.scope():
        mean = sg.Variable(1.0, synchronization="on_read", aggregation="mean")
        first = sg.Variable(1.0, synchronization="on_read", aggregation="only_first_replica")
    strategy.run(lambda: (mean.assign_add(contribution()), first.assign_add(contribution())))
    with strategy.scope():
        mean.assign_add(2.0)
        first.assign_sub(2.0)
    parts = strategy.run(lambda: (mean.value, first.value))
    assert_parts(strategy, parts[0], lambda i: 4.0 + i)
    assert_parts(strategy, parts[1], lambda i: float(i))


def test_integer_assigned_to_on_read_sum_loses_nothing(strategy) -> None:
    with strategy.scope():
        total = sg.Variable(0, dtype="int32", synchronization="on_read", aggregation="sum")
        total.assign(13)
    assert int(total.value) == 13


def test_synchronization_none_is_refused_under_several_replicas(distributing) -> None:
    with (
        distributing.scope(),
        pytest.raises(ValueError, match="synchronization NONE under a strategy"),
    ):
        sg.Variable(1.0, synchronization="none")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_mean_of_integers_is_refused_under_several_replicas(distributing, dtype) -> None:
    with (
        distributing.scope(),
        pytest.raises(ValueError, match=f"aggregation MEAN and dtype {dtype}"),
    ):
        sg.Variable(1, dtype=dtype, aggregation="mean")


def test_one_replica_takes_every_annotation(sole) -> None:
    with sole.scope():
        assert float(sg.Variable(1.0, synchronization="none").value) == 1.0
        assert int(sg.Variable(1, dtype="int32", aggregation="mean").value) == 1


def test_unknown_annotations_are_refused(strategy) -> None:
    with strategy.scope():
        with pytest.raises(ValueError, match="aggregation='max' is not a valid value"):
            sg.Variable(1.0, aggregation="max")
        with pytest.raises(ValueError, match="synchronization='later' is not a valid value"):
            sg.Variable(1.0, synchronization="later")


def test_members_numbers_and_strings_of_keras_mean_the_same(strategy) -> None:
    spellings = [
        (sg.VariableSynchronization.ON_READ, sg.VariableAggregation.SUM),
        (3, 1),
        ("on_read", "sum"),
        ("ON_READ", "SUM"),
    ]
    with strategy.scope():
        for synchronization, aggregation in spellings:
            variable = sg.Variable(1.0, synchronization=synchronization, aggregation=aggregation)
            assert (variable.synchronization, variable.aggregation) == ("on_read", "sum")


def test_variable_is_trainable_unless_on_read_and_an_explicit_value_is_kept(strategy) -> None:
    with strategy.scope():
        assert sg.Variable(1.0).trainable
        assert not sg.Variable(1.0, synchronization="on_read", aggregation="sum").trainable
        assert sg.Variable(1.0, True, synchronization="on_read", aggregation="sum").trainable
        assert not sg.Variable(1.0, trainable=False).trainable


def test_random_initial_value_is_the_same_on_all_copies(strategy, execution) -> None:
    with strategy.scope():
        layer = keras.layers.Dense(3, kernel_initializer="glorot_uniform")
        layer.build((None, 2))
    kernel = np.asarray(layer.kernel)
    assert np.ptp(kernel) > 0
    assert_parts(strategy, strategy.run(lambda: layer.kernel.value), lambda _: kernel)


def test_weights_of_layers_and_slots_of_optimizers_follow_the_policy(strategy) -> None:
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 2))
        optimizer = keras.optimizers.Adam()
        optimizer.build(layer.trainable_variables)
        metric = keras.metrics.Mean()
    for variable in [*layer.variables, *optimizer.variables, *metric.variables]:
        assert strategy.extended.variable_created_in_scope(variable)


def test_variable_created_in_the_first_call_follows_the_policy(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    made: dict[str, keras.Variable] = {}

    def step():
        if not made:
            made["total"] = sg.Variable(10.0, aggregation="sum")
            made["own"] = sg.Variable(10.0, synchronization="on_read", aggregation="mean")
        for variable in made.values():
            variable.assign_add(contribution())
        return made["total"].value, made["own"].value

    total, own = strategy.run(step)
    assert_parts(strategy, total, lambda _: 10 + n * (n + 1) / 2)
    assert_parts(strategy, own, lambda i: 11.0 + i)
    first = dict(made)
    total, own = strategy.run(step)
    assert {name: made[name] is variable for name, variable in first.items()} == dict.fromkeys(
        made, True
    )
    assert_parts(strategy, total, lambda _: 10 + n * (n + 1))
    assert_parts(strategy, own, lambda i: 12.0 + 2 * i)
    for variable in made.values():
        assert strategy.extended.variable_created_in_scope(variable)
    np.testing.assert_allclose(made["own"].value, 10 + (n + 1))


def test_layer_built_in_the_first_call_follows_the_policy(strategy, execution) -> None:
    layer = keras.layers.Dense(2, kernel_initializer="ones", use_bias=False)
    result = strategy.run(layer, args=(jnp.ones((3, 4)),))
    assert_parts(strategy, result, lambda _: np.full((3, 2), 4.0))
    assert strategy.extended.variable_created_in_scope(layer.kernel)
    layer.kernel.assign(np.full((4, 2), 2.0, "float32"))
    result = strategy.run(layer, args=(jnp.ones((3, 4)),))
    assert_parts(strategy, result, lambda _: np.full((3, 2), 8.0))


def test_variable_of_another_strategy_is_refused(strategy, foreign, execution) -> None:
    with foreign.scope():
        other = sg.Variable(1.0, name="other")
    for step in (lambda: other.value, lambda: other.assign(jnp.float32(2.0))):
        with pytest.raises(
            ValueError, match=r"Variable '.*other' belongs to .* and was used in a step"
        ):
            strategy.run(step)
    assert float(other.value) == 1.0


def test_plain_variable_made_outside_can_be_read_and_assigned_alike(strategy, execution) -> None:
    plain = keras.Variable(3.0)
    result = strategy.run(lambda: plain + contribution())
    assert_parts(strategy, result, lambda i: 4.0 + i)
    strategy.run(lambda: plain.assign(jnp.float32(7.0)))
    assert float(plain.value) == 7.0
    assert len(plain.value.sharding.device_set) == 1
