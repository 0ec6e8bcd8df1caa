"""Variables in shards on parameter servers: what they are, and which rows travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.keras.variable import ParameterServerVariable
from tests.unit.parameter_server.clusters import Asked, coordinated

VALUES = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
TABLE = np.random.default_rng(1).normal(size=(9000, 8)).astype("float32")
ROWS = np.random.default_rng(2).uniform(1, 2, size=(4, 3)).astype("float32")
IDS = np.array([9, 0, 4, 3])


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    """Of two servers, over which variables are split into three shards."""
    partitioner = sg.partitioners.FixedShardsPartitioner(3)
    with coordinated(num_servers=2, variable_partitioner=partitioner) as made:
        yield made


class Pulled:
    """What is asked of servers: names of whole values, and ids of rows."""

    def __init__(self, client: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.ids: list[int] = []
        pull, pull_rows = client.pull, client.pull_rows

        def noted_pull(names: Any) -> Any:
            self.names.extend(names)
            return pull(names)

        def noted_pull_rows(name: str, ids: Any) -> Any:
            self.ids.extend(np.unique(ids).tolist())
            return pull_rows(name, ids)

        monkeypatch.setattr(client, "pull", noted_pull)
        monkeypatch.setattr(client, "pull_rows", noted_pull_rows)


@pytest.fixture
def pulled(strategy, monkeypatch) -> Pulled:
    """What the coordinator asks for."""
    return Pulled(strategy.placement.remote.variables.client, monkeypatch)


def variable(strategy: Any, value: Any = VALUES, **options: Any) -> Any:
    with strategy.scope():
        return sg.Variable(value, **options)


# What it is


@pytest.mark.compatibility
def test_what_is_split_is_one_and_a_keras_variable(strategy) -> None:
    v = variable(strategy, name="weights")
    assert isinstance(v, sg.ShardedVariable)
    assert isinstance(v, keras.Variable)
    assert isinstance(v, ParameterServerVariable)
    assert (v.shape, v.dtype, v.name, v.ndim, len(v)) == ((10, 3), "float32", "weights", 2, 3)
    assert "shape=(10, 3), dtype=float32, 3 shards" in repr(v)
    for whole in (np.float32(2), np.ones((1, 4), "float32"), np.zeros((0, 2))):
        assert not isinstance(variable(strategy, whole), sg.ShardedVariable)


# Its shards


@pytest.mark.compatibility
def test_shards_are_variables_of_their_own_rows(strategy, pulled) -> None:
    v = variable(strategy, name="own")
    first, second, third = v
    assert all(one is other for one, other in zip(v, v.variables, strict=True))
    assert [shard.shape for shard in v] == [(4, 3), (3, 3), (3, 3)]
    assert {shard.dtype for shard in v} == {"float32"}
    assert [shard.path for shard in v] == ["own/part_0", "own/part_1", "own/part_2"]
    assert [shard.name for shard in v] == ["part_0", "part_1", "part_2"]
    assert isinstance(second, keras.Variable)
    np.testing.assert_array_equal(second.value, VALUES[4:7])
    second.assign(np.zeros((3, 3)))
    first.assign_add(np.ones((4, 3)))
    third.assign_sub(VALUES[7:])
    third.scatter_add(sg.IndexedSlices(np.ones((1, 3)), np.array([2])))
    assert set(pulled.names) <= {"own/part_0", "own/part_1", "own/part_2"}
    expected = np.concatenate([VALUES[:4] + 1, np.zeros((5, 3)), np.ones((1, 3))])
    np.testing.assert_allclose(v, expected, atol=1e-6)
    with strategy.scope(), keras.name_scope("own"):  # whose name is none of a shard
        other = sg.Variable(np.zeros((4, 3), "float32"), name="part_0")
    np.testing.assert_allclose(v, expected, atol=1e-6)
    np.testing.assert_array_equal(other.value, np.zeros((4, 3)))


def test_shard_is_asked_of_its_server_only(coordinator, strategy, monkeypatch) -> None:
    v = variable(strategy)
    servers = strategy.placement.remote.variables.placement_of(v).servers
    asked: list[int] = []
    connections = strategy._connections
    ask_all = connections.ask_all

    def noted_ask_all(messages: Any) -> Any:
        asked.extend(messages)
        return ask_all(messages)

    monkeypatch.setattr(connections, "ask_all", noted_ask_all)
    for shard, server in zip(v, servers, strict=True):
        asked.clear()
        shard.assign_add(np.ones(shard.shape))
        shard.value  # noqa: B018 - reading it asks
        assert set(asked) == {server}


# Reading


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        pytest.param(np.s_[2:9:3], [2, 5, 8], marks=pytest.mark.compatibility),
        (np.s_[8:0:-3, 1], [2, 5, 8]),
        (np.s_[5], [5]),
        (np.s_[-1, 1:], [9]),
        (np.s_[[1, 1, -1], [0, 2, 1]], [1, 9]),
        (np.arange(10) % 4 == 0, [0, 4, 8]),
        (np.s_[5:5], []),
    ],
    ids=range(7),
)
def test_only_rows_of_a_slice_travel(strategy, pulled, index, rows) -> None:
    got = variable(strategy)[index]
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, VALUES[index])
    with pytest.raises(IndexError, match="an index within shape"):
        variable(strategy)[0, 3]
    assert (pulled.names, pulled.ids) == ([], rows)


def test_it_reads_as_one_array(strategy) -> None:
    v = variable(strategy)
    for read in (v.value, v.numpy(), np.asarray(v), jnp.asarray(v), v[...], v[:], +v):
        np.testing.assert_array_equal(read, VALUES)
    np.testing.assert_array_equal(v[..., 1], VALUES[..., 1])
    np.testing.assert_array_equal(v[::-1], VALUES[::-1])
    np.testing.assert_allclose(2 - v * v, 2 - VALUES * VALUES, rtol=1e-6)
    np.testing.assert_allclose(keras.ops.sum(v), VALUES.sum(), rtol=1e-5)


@pytest.mark.compatibility
@pytest.mark.parametrize("value", [VALUES, TABLE], ids=["variable", "table"])
def test_lookup_outside_of_a_step_asks_for_its_rows(strategy, pulled, value) -> None:
    with strategy.scope():
        layer = keras.layers.Embedding(*value.shape)
        layer.build((None,))
    v = layer.embeddings
    v.assign(value)
    ids = np.array([[7, -1], [7, len(value)]])
    expected = sg.nn.embedding_lookup(value, ids)
    np.testing.assert_array_equal(sg.nn.embedding_lookup(v, ids), expected)
    assert (pulled.names, pulled.ids) == ([], [7, len(value) - 1])
    np.testing.assert_array_equal(layer(ids[:, :1]), value[ids[:, :1]])
    assert (pulled.names == []) == v.has_rows
    assert np.isnan(sg.nn.embedding_lookup(v, [len(value)])).all()


def test_rows_of_an_optimizer_are_read_from_what_it_made(coordinator, strategy) -> None:
    """What servers have updated are arrays of JAX."""
    v = variable(strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build([v])

    def step() -> None:
        _, gradients = sg.value_and_grad(lambda: jnp.sum(jnp.square(v.value)), [v])
        optimizer.apply(gradients, [v])

    coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
    np.testing.assert_allclose(v[[3, 8]], VALUES[[3, 8]] - VALUES[[3, 8]], atol=1e-6)
    slot = optimizer.momentums[0]
    assert not isinstance(slot, sg.ShardedVariable)
    np.testing.assert_allclose(slot.value, -VALUES, rtol=1e-6)


# Changes


@pytest.mark.parametrize(
    ("method", "change", "is_read"),
    [
        pytest.param(
            "scatter_add", lambda now, rows: now + rows, False, marks=pytest.mark.compatibility
        ),
        ("scatter_sub", lambda now, rows: now - rows, False),
        ("scatter_div", lambda now, rows: now / rows, True),
        ("scatter_max", np.maximum, True),
        ("scatter_update", lambda now, rows: rows, False),
        ("batch_scatter_update", lambda now, rows: rows, False),
    ],
)
def test_only_scattered_rows_travel(strategy, pulled, method, change, is_read) -> None:
    v = variable(strategy)
    expected = VALUES.copy()
    expected[IDS] = change(VALUES[IDS], ROWS)
    assert getattr(v, method)(sg.IndexedSlices(ROWS, IDS)) is v
    assert (pulled.names, pulled.ids) == ([], sorted(IDS) if is_read else [])
    np.testing.assert_allclose(v, expected, rtol=1e-6)


def test_repeated_negative_and_missing_rows(strategy) -> None:
    v = variable(strategy)
    v.scatter_add(sg.IndexedSlices(np.ones((4, 3)), np.array([5, -5, 5, 10])))
    expected = VALUES.copy()
    expected[5] += 3
    np.testing.assert_allclose(v, expected, rtol=1e-6)
    v.scatter_mul(sg.IndexedSlices(np.full((3, 3), 2.0), np.array([0, -10, 11])))
    expected[0] *= 4
    np.testing.assert_allclose(v, expected, rtol=1e-6)


def test_value_of_another_shape_changes_no_shard(strategy) -> None:
    v = variable(strategy)
    for wrong in (np.ones((11, 3)), np.ones((10, 2)), np.ones(10)):
        with pytest.raises(ValueError, match="cannot take a value of shape"):
            v.assign_add(wrong)
        with pytest.raises(ValueError, match="must match"):
            v.assign(wrong)
    np.testing.assert_array_equal(v, VALUES)


# On workers


@pytest.mark.compatibility
def test_worker_has_it_in_shards(coordinator, strategy) -> None:
    v = variable(strategy)
    second = v.variables[1]

    def function() -> Any:
        assert isinstance(v, sg.ShardedVariable)
        assert second is v.variables[1]
        sg.get_strategy().run(lambda: second.assign_add(jnp.ones((3, 3))))
        v.scatter_update(sg.IndexedSlices(np.zeros((1, 3)), np.array([9])))
        return [shard.shape for shard in v], v[3:5], v.path

    shapes, rows, path = coordinator.schedule(function).fetch()
    assert shapes == [(4, 3), (3, 3), (3, 3)]
    assert path == v.path
    expected = VALUES.copy()
    expected[4:7] += 1
    expected[9] = 0
    np.testing.assert_array_equal(rows, expected[3:5])
    np.testing.assert_array_equal(v, expected)


@pytest.mark.compatibility
def test_step_reads_and_changes_it(coordinator, strategy) -> None:
    v, w = variable(strategy), variable(strategy)

    def step() -> Any:
        read = v[2:9:3], v[-1], v[VALUES > 0], v.variables[0].value
        v.scatter_add(sg.IndexedSlices(jnp.ones((2, 3)), jnp.array([9, 4])))
        w.assign_sub(v.value)
        return read

    results = coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
    for got, index in zip(results, (np.s_[2:9:3], -1, VALUES > 0, np.s_[:4]), strict=True):
        np.testing.assert_array_equal(got, VALUES[index])
    expected = VALUES.copy()
    expected[[9, 4]] += 1
    np.testing.assert_allclose(v, expected, rtol=1e-6)
    np.testing.assert_allclose(w, VALUES - expected, atol=1e-6)


@pytest.mark.compatibility
def test_slice_of_a_table_in_a_step_asks_for_its_rows(coordinator, strategy) -> None:
    with strategy.scope():
        layer = keras.layers.Embedding(*TABLE.shape)
        layer.build((None,))
    layer.embeddings.assign(TABLE)
    asked = Asked(strategy.cluster.servers)

    def step() -> Any:
        table = layer.embeddings
        return table[[5, 8999, 5]], table[10:4:-2, 1]

    picked, column = coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
    np.testing.assert_array_equal(picked, TABLE[[5, 8999, 5]])
    np.testing.assert_array_equal(column, TABLE[10:4:-2, 1])
    assert (asked.rows.total(), asked.whole) == (5, {})


@pytest.mark.compatibility
def test_gradient_outside_of_a_step(strategy) -> None:
    v = variable(strategy)
    _, (got,) = sg.value_and_grad(lambda: jnp.sum(jnp.square(v[3:5])), [v])
    expected = np.zeros_like(VALUES)
    expected[3:5] = 2 * VALUES[3:5]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# What is refused


@pytest.mark.compatibility
def test_traced_index_is_refused(coordinator, strategy) -> None:
    v = variable(strategy)
    coordinator.schedule(
        lambda i: sg.get_strategy().run(lambda i: v[i], args=(i,)), args=(jnp.asarray(3),)
    )
    with pytest.raises(TypeError, match="was indexed by the traced value"):
        coordinator.join()
