"""Variables on parameter servers: as the coordinator and as workers see them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.variable_client import Stored, Unplaced
from stratagem.parameter_server.keras import variable as served_variable
from stratagem.parameter_server.keras.variable import ParameterServerVariable
from tests.unit.parameter_server.clusters import local_strategy

START = np.arange(6, dtype="float32").reshape(2, 3)


# Creation and reading


@pytest.mark.slow
def test_shapes_are_inferred_without_the_values(strategy, monkeypatch) -> None:
    """A table may be larger than the coordinator."""
    asked: list[str] = []
    pull = strategy.placement.remote.variables.client.pull

    def noted_pull(names: Any) -> Any:
        asked.extend(names)
        return pull(names)

    monkeypatch.setattr(strategy.placement.remote.variables.client, "pull", noted_pull)
    with strategy.scope():
        ids = keras.layers.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(9000, 8)(ids)
        model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(rows)))
        model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.arange(12, dtype="int32").reshape(4, 3), np.ones((4, 2), "float32"), verbose=0)
    assert model.compute_output_spec(keras.KerasTensor((5, 3), "int32")).shape == (5, 2)
    assert [name for name in asked if "embedding" in name] == []
    assert np.asarray(model.layers[1].embeddings.value).shape == (9000, 8)
    assert sum("embedding" in name for name in asked) == 1


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(START, marks=pytest.mark.compatibility),
        np.float32(2.5),
        np.array([True, False]),
        np.ones((2, 2), jnp.bfloat16),
        np.zeros((0, 3), "float32"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_variable_is_on_the_servers_as_it_was_made(strategy, value) -> None:
    with strategy.scope():
        v = sg.Variable(value)
    assert isinstance(v, ParameterServerVariable)
    assert isinstance(v, keras.Variable)
    assert v.distribute_strategy is strategy
    assert v.dtype == str(value.dtype)
    assert isinstance(v.value, jax.Array)
    assert v.value.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(v.value), value)
    np.testing.assert_array_equal(v.numpy(), value)
    assert isinstance(v.place, Stored)
    held = strategy.placement.remote.variables.client.pull([v.place.name])[v.place.name]
    np.testing.assert_array_equal(held, value)


def test_two_variables_of_one_path_have_names_of_their_own(coordinator, strategy) -> None:
    with strategy.scope():
        one, two = (sg.Variable(np.full(2, i, "float32"), name="twin") for i in (1, 2))
        three = sg.Variable(np.full(2, 3.0, "float32"), name="twin_2")
    assert one.path == two.path == "twin"
    assert [v.place.name for v in (one, two, three)] == ["twin", "twin_2", "twin_2_2"]
    two.assign([5.0, 5.0])
    assert [v.numpy().tolist() for v in (one, two, three)] == [[1, 1], [5, 5], [3, 3]]
    with strategy.scope():
        v = sg.Variable(START, name="kernel:0")  # a colon is part of a name
    assert float(coordinator.schedule(lambda: jnp.sum(v.value)).fetch()) == START.sum()


@pytest.mark.compatibility
def test_initial_values_are_those_of_one_device(strategy) -> None:
    def make() -> list[Any]:
        keras.utils.set_random_seed(7)
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(5), keras.layers.BatchNormalization()]
        )
        return [keras.initializers.RandomNormal(seed=3)((2, 2)), *model.variables]

    alone = make()
    with strategy.scope():
        served = make()
    for one, other in zip(alone, served, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# Changes by the coordinator


@pytest.mark.compatibility
def test_coordinator_assigns_adds_and_subtracts(strategy) -> None:
    with strategy.scope():
        v = sg.Variable(START)
        count = sg.Variable(np.array([1, 2], "int32"))
    np.testing.assert_array_equal(v.assign(START * 2), START * 2)
    np.testing.assert_array_equal(v.assign_add(np.ones((2, 3))), START * 2 + 1)
    np.testing.assert_array_equal(v.assign_sub(START), START + 1)
    count.assign_add([1, 1])
    count.assign_sub([5, 0])
    assert count.numpy().tolist() == [-3, 3]
    assert count.numpy().dtype == np.int32
    with pytest.raises(ValueError, match="shape"):
        v.assign(np.ones((3, 2), "float32"))
    np.testing.assert_array_equal(v.numpy(), START + 1)


# Where they are


def test_scalar_stays_here_until_somebody_needs_it(coordinator, strategy) -> None:
    with strategy.scope():
        count = sg.Variable(3, trainable=False, name="count")
        weight = sg.Variable(3.0, name="weight")
    assert isinstance(count.place, Unplaced)
    assert isinstance(weight.place, Stored)
    count.assign_add(4)
    count.assign_sub(1)
    assert int(count.value) == 6
    assert isinstance(count.place, Unplaced)
    coordinator.schedule(
        lambda: sg.get_strategy().run(lambda: count.assign_add(jnp.asarray(10)))
    ).fetch()
    assert isinstance(count.place, Stored)
    assert int(count.value) == 16


@pytest.mark.parametrize(
    ("make", "has_rows"),
    [
        pytest.param(
            lambda: keras.layers.Embedding(8192, 8), True, marks=pytest.mark.compatibility
        ),
        (lambda: keras.layers.Embedding(8191, 8), False),  # of less than 65,536 numbers
        (lambda: keras.layers.Dense(512), False),
    ],
    ids=["large", "small", "kernel"],
)
def test_rows_are_asked_for_in_large_embeddings_only(strategy, make, has_rows) -> None:
    with strategy.scope():
        layer = make()
        layer.build((None, 512))
    assert layer.weights[0].has_rows is has_rows
    assert strategy.placement.remote.variables.placement_of(layer.weights[0]).has_rows is has_rows


def test_lookup_in_what_is_no_table_is_one_all_the_same(coordinator, strategy) -> None:
    values = np.random.default_rng(0).normal(size=(9000, 8)).astype("float32")
    with strategy.scope():
        v = sg.Variable(values)
    got = coordinator.schedule(
        lambda ids: sg.get_strategy().run(
            lambda ids: sg.nn.embedding_lookup(v, ids), args=(jnp.asarray(ids),)
        ),
        args=(np.array([3, 8999, 3]),),
    ).fetch()
    np.testing.assert_array_equal(got, values[[3, 8999, 3]])


@pytest.mark.parametrize(
    ("initializer", "num_shards"),
    [
        ("uniform", 3),
        pytest.param("uniform", 1, marks=pytest.mark.slow),
        pytest.param("glorot_normal", 3, marks=pytest.mark.slow),
        pytest.param("orthogonal", 3, marks=pytest.mark.slow),
        ("ones", 3),
    ],
)
def test_initial_values_of_what_is_large_are_those_of_one_piece(
    monkeypatch, initializer, num_shards
) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(11)
        first = keras.Variable(initializer, shape=(40, 6))
        return first, keras.Variable(initializer, shape=(40, 6))

    alone = make()
    monkeypatch.setattr(served_variable, "_MAX_LOCAL_BYTES", 100)
    partitioner = sg.partitioners.FixedShardsPartitioner(num_shards)
    with (
        local_strategy(num_servers=2, variable_partitioner=partitioner) as strategy,
        strategy.scope(),
    ):
        served = make()
        for one, other in zip(alone, served, strict=True):
            np.testing.assert_allclose(other.numpy(), np.asarray(one.value), rtol=1e-6)


# Layers that compute in another dtype


@pytest.mark.compatibility
def test_layers_read_in_the_dtype_that_they_compute_in(coordinator, strategy) -> None:
    with strategy.scope():
        layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
        layer.build((None, 3))
    x = np.ones((4, 3), "float32")
    got = coordinator.schedule(
        lambda x: sg.get_strategy().run(lambda x: layer(x), args=(jnp.asarray(x),)), args=(x,)
    ).fetch()
    assert got.dtype == jnp.bfloat16
    assert layer.kernel.dtype == "float32"
    np.testing.assert_allclose(
        got.astype("float32"), x @ layer.kernel.numpy(), rtol=2e-2, atol=2e-2
    )


# Seeds


@pytest.mark.slow
def test_first_worker_draws_as_one_device_and_others_draw_other_numbers(
    coordinator, strategy
) -> None:
    alone = keras.random.SeedGenerator(4)
    with strategy.scope():
        seed = keras.random.SeedGenerator(4)

    def function() -> Any:
        return [
            sg.get_strategy().run(lambda: keras.random.uniform((3,), seed=seed)) for _ in range(2)
        ]

    first, second = (coordinator.schedule(function, worker=worker).fetch() for worker in (0, 1))
    third = coordinator.schedule(  # another function goes on with the same generator
        lambda: sg.get_strategy().run(lambda: keras.random.uniform((3,), seed=seed) * 1), worker=0
    ).fetch()
    expected = [np.asarray(keras.random.uniform((3,), seed=alone)) for _ in range(3)]
    np.testing.assert_array_equal([*first, third], expected)
    assert len(np.unique([*first, *second])) == 12


# What is refused


@pytest.mark.compatibility
def test_constraints_of_what_no_server_has_whole_are_refused(strategy) -> None:
    table = keras.layers.Embedding(9000, 8, embeddings_constraint="non_neg")
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match=r"has the constraint .*NonNeg.*by rows"),
    ):
        table.build(())
    with strategy.scope():
        v = sg.Variable(START)
    v.constraint = keras.constraints.NonNeg()
    assert isinstance(v.constraint, keras.constraints.NonNeg)
    v.constraint = None
    assert v.constraint is None
    halves = sg.partitioners.FixedShardsPartitioner(2)
    with local_strategy(variable_partitioner=halves) as split, split.scope():
        layer = keras.layers.Dense(2, kernel_constraint="non_neg")
        with pytest.raises(NotImplementedError, match=r"has the constraint .*have its shards"):
            layer.build((None, 4))


def test_function_of_the_coordinator_asks_the_servers_at_each_call(strategy) -> None:
    with strategy.scope():
        v = sg.Variable(START)

    @sg.function
    def doubled() -> Any:
        v.assign(2.0 * v.value)
        return v.value + 1.0

    for factor in (2.0, 4.0):
        np.testing.assert_allclose(doubled(), factor * START + 1.0)


@pytest.mark.compatibility
@pytest.mark.parametrize("is_in_step", [False, True], ids=["function", "step"])
def test_variables_are_not_created_on_workers(coordinator, is_in_step) -> None:
    def create() -> Any:
        return sg.Variable(START, name="late").value

    def function() -> Any:
        return sg.get_strategy().run(create) if is_in_step else create()

    coordinator.schedule(function)
    with pytest.raises(RuntimeError, match="was created in a function on a worker"):
        coordinator.join()


def test_variable_of_another_strategy_is_refused(coordinator) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        foreign = sg.Variable(START)
    with pytest.raises(ValueError, match="belongs to MirroredStrategy"):
        coordinator.schedule(lambda: sg.get_strategy().run(lambda: foreign.value))


@pytest.mark.compatibility
def test_variable_of_no_strategy_is_a_copy_on_each_worker(coordinator) -> None:
    plain = keras.Variable(START, trainable=False)

    def function() -> Any:
        return sg.get_strategy().run(lambda: plain.value * 2.0)

    np.testing.assert_array_equal(coordinator.schedule(function).fetch(), START * 2)


def test_step_in_the_coordinator_runs_there_and_warns(strategy) -> None:
    with strategy.scope():
        v = sg.Variable(np.ones(2, "float32"))
    words = r"strategy.run was called in the coordinator"
    with pytest.warns(RuntimeWarning, match=words) as found:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))
    assert found[0].filename == __file__
    assert v.numpy().tolist() == [2, 2]
