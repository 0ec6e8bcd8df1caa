"""HybridStrategy with tables on parameter servers, in one fit with tables of other places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster_plan import ClusterPlan
from tests.unit.parameter_server.clusters import Asked, OneThatDies, ThreadCluster

TWO = ["cpu:0", "cpu:1"]
NUM_USERS, NUM_ITEMS, NUM_ARTISTS = 9000, 8192, 8300  # times 8: large enough for rows
RNG = np.random.default_rng(0)
USERS = RNG.integers(0, NUM_USERS, (22, 3), dtype="int32")
ITEMS = RNG.integers(0, NUM_ITEMS, (22,), dtype="int32")
ARTISTS = RNG.integers(0, NUM_ARTISTS, (22,), dtype="int32")
USERS[::3, 0] = 7
X, Y = [USERS, ITEMS, ARTISTS], RNG.normal(size=(22, 1)).astype("float32")
MIXED = {"users": "server", "items": "sharded", sg.placement.in_layer("artists"): "central"}
EVERYTHING = {"": "server"}
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}


@contextlib.contextmanager
def hybrid(
    placement: Any = MIXED, devices: list[str] = TWO, cluster: Any = None, **arguments: Any
) -> Iterator[tuple[sg.HybridStrategy, Any]]:
    """A strategy whose servers are threads, and these."""

    def make(plan: ClusterPlan) -> Any:
        nonlocal cluster
        cluster = cluster or ThreadCluster(plan.num_servers, [])
        return cluster

    with mock.patch("stratagem.parameter_server.strategy.start_cluster", make):
        made = sg.HybridStrategy(
            devices, placement=placement, parameter_device="cpu:3", **arguments
        )
    with made:
        yield made, cluster


@pytest.fixture(scope="module")
def mixed() -> Iterator[tuple[sg.HybridStrategy, ThreadCluster]]:
    """One whose table of users is in two shards on two servers."""
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with hybrid(num_servers=2, variable_partitioner=partitioner) as made:
        # Its variables match every rule of the placement, whichever test comes first.
        model_in(made[0], keras.optimizers.SGD)
        yield made


def model_in(strategy: Any, optimizer: Any, steps: int = 1) -> keras.Model:
    """A model of three tables; without a strategy in plain Keras, and with so many steps a call."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        inputs = [keras.Input(shape, dtype="int32") for shape in ((3,), (), ())]
        users = layers.Embedding(NUM_USERS, 8, name="users")(inputs[0])
        items = layers.Embedding(NUM_ITEMS, 8, name="items")(inputs[1])
        artists = layers.Embedding(NUM_ARTISTS, 8, name="artists")(inputs[2])
        hidden = layers.Concatenate()([layers.Flatten()(users), items, artists])
        hidden = layers.Dense(16, activation="relu", name="hidden")(hidden)
        model = keras.Model(inputs, layers.Dense(1, name="top")(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def fitted(model: keras.Model, **arguments: Any) -> Any:
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 / (epoch + 1))
    return model.fit(X, Y, **{**FIT, "callbacks": [slower], **arguments}).history


def state(model: keras.Model) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def assert_equal(one: keras.Model, other: keras.Model, **tolerance: float) -> None:
    limits = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for left, right in zip(state(one), state(other), strict=True):
        np.testing.assert_allclose(left.value, right.value, **limits, err_msg=left.path)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "clipped together": lambda: keras.optimizers.Adagrad(0.05, global_clipnorm=0.01),
    "clipped alone": lambda: keras.optimizers.SGD(0.05, clipnorm=0.01, loss_scale_factor=64.0),
    "scheduled": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    ),
}


@pytest.fixture(scope="module")
def trained(mixed) -> tuple[keras.Model, keras.Model]:
    """A model that was fitted there, and one that was by plain Keras, with the same history."""
    optimizer = OPTIMIZERS["clipped together"]
    alone, model = model_in(None, optimizer), model_in(mixed[0], optimizer)
    wanted, got = fitted(alone), fitted(model)
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5)
    return model, alone


@pytest.mark.slow
def test_fit_gives_what_one_device_gives(mixed, trained) -> None:
    model, alone = trained
    assert_equal(model, alone)
    assert int(model.optimizer.iterations) == 6
    # What servers were told: the rate of the second epoch, and they have counted on.
    for server in range(2):
        scalars = mixed[0].placement.remote.variables.client.scalars(server)
        (rate,) = [v for name, v in scalars.items() if name.endswith("learning_rate")]
        (count,) = [v for name, v in scalars.items() if name.endswith("iteration")]
        np.testing.assert_allclose([rate, count], [0.025, 6], rtol=1e-6)
    wanted = alone.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), wanted, rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), alone.predict(X, verbose=0), rtol=1e-4)


def test_each_table_is_where_its_rule_says(mixed, trained) -> None:
    assert repr(mixed[0]) == "HybridStrategy(cpu:0, cpu:1, 2 servers)"
    with mixed[0].scope(), pytest.raises(NotImplementedError, match="has the constraint"):
        keras.layers.Embedding(9, 2, name="users", embeddings_constraint="non_neg").build()
    model, _ = trained
    users = model.get_layer("users").embeddings
    assert [shard.shape for shard in users.variables] == [(4500, 8), (4500, 8)]
    places = {one.path: one.stored for one in model.weights if one is not users}
    devices = {path: len(kept.devices()) for path, kept in places.items()}
    assert devices.pop("artists/embeddings") == 1
    assert {*devices.values()} == {2}
    part = places["items/embeddings"].addressable_shards[0].data
    assert part.shape == (NUM_ITEMS // 2, 8)


def test_only_rows_travel(mixed, trained) -> None:
    _, servers = mixed
    model, alone = trained
    asked = Asked(servers.servers)
    fitted(model)
    wanted = 2 * sum(len(np.unique(USERS[first : first + 8])) for first in (0, 8, 16))
    assert asked.rows.total() == wanted
    assert not asked.whole + asked.sent  # nothing is asked for or sent whole
    # Rows, gradients and ids; the first or last row of a shard stands for what is not there.
    assert asked.num_bytes <= (wanted + 2 * 6) * (2 * 8 * 4 + 8)
    fitted(alone)  # so that both are the same for other tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "placement", "devices", "steps"),
    [
        ("SGD", MIXED, TWO, 3),
        ("clipped together", EVERYTHING, TWO, 1),
        ("clipped alone", MIXED, ["cpu:0"], 1),
        ("scheduled", MIXED, [*TWO, "cpu:2", "cpu:4"], 1),
        ("Adagrad", EVERYTHING, ["cpu:0"], 3),
    ],
)
def test_every_way_gives_what_one_device_gives(name, placement, devices, steps) -> None:
    alone = model_in(None, OPTIMIZERS[name])
    callbacks: Any = {"callbacks": []} if name == "scheduled" else {}
    wanted = fitted(alone, **callbacks)
    with hybrid(placement, devices) as (strategy, _):
        model = model_in(strategy, OPTIMIZERS[name], steps)
        got = fitted(model, **callbacks)
        for key, values in wanted.items():
            np.testing.assert_allclose(got[key], values, rtol=1e-5)
        assert_equal(model, alone)


@pytest.mark.slow
def test_loop_of_ones_own_op_by_op_and_compiled(mixed) -> None:
    strategy, _ = mixed
    ids = np.int32([[3, 7, 3], [8999, -1, 7]])

    def trained(scope: Any, run: Any, eagerly: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with scope:
            table = keras.layers.Embedding(NUM_USERS, 8, name="users")
            table.build()
            bias = sg.Variable(np.ones(8, "float32"), name="bias")
            optimizer = keras.optimizers.Adagrad(0.1)
            optimizer.build([table.embeddings, bias])

        def step(ids: Any) -> Any:
            def loss() -> Any:
                return jnp.sum(jnp.square(table(ids) + bias)) / 2

            value, grads = sg.value_and_grad(loss, [table.embeddings, bias])
            sg.apply_gradients(optimizer, zip(grads, [table.embeddings, bias], strict=True))
            return value

        sg.config.run_eagerly(eagerly)
        try:
            losses = [run(step) for _ in range(2)]
        finally:
            sg.config.run_eagerly(False)
        assert int(optimizer.iterations) == 2
        return [np.asarray(losses), np.asarray(table.embeddings.value), np.asarray(bias.value)]

    def run(step: Any) -> Any:
        parts = strategy.distribute_values_from_function(
            lambda context: jnp.asarray(ids[context.replica_id_in_sync_group])
        )
        return strategy.reduce("sum", strategy.run(step, args=(parts,)), axis=None)

    one = sg.OneDeviceStrategy("cpu:0")
    wanted = trained(one.scope(), lambda step: one.run(step, args=(ids,)), False)
    for eagerly in (False, True):
        got = trained(strategy.scope(), run, eagerly)
        for left, right in zip(got, wanted, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_everything_that_is_trained_may_be_on_servers(mixed) -> None:
    strategy, _ = mixed
    with strategy.scope():
        table = sg.Variable(np.zeros((4, 2), "float32"), name="users")
        optimizers = [keras.optimizers.Nadam(0.1), keras.optimizers.Nadam(0.1)]
        optimizers[0].build([table])
    alone = keras.Variable(np.zeros((4, 2), "float32"))
    gradient = np.float32([[1, 2]] * 4)

    def step() -> None:
        for _ in range(2):  # two updates in a step
            optimizers[0].apply([gradient / 2], [table])

    strategy.run(step)
    strategy.run(step)
    for _ in range(4):
        optimizers[1].apply([gradient], [alone])
    np.testing.assert_allclose(table.value, alone.value, rtol=1e-5)
    for left, right in zip(optimizers[0].variables, optimizers[1].variables, strict=True):
        np.testing.assert_allclose(left.value, right.value, rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_go_on_where_they_were_left(tmp_path) -> None:
    optimizer = OPTIMIZERS["Adagrad"]
    with hybrid() as (strategy, _):
        model = model_in(strategy, optimizer)
        fitted(model)
        saved = sg.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "made")
        model.save_weights(tmp_path / "made.weights.h5")
        predicted = model.predict(X, verbose=0)
        fitted(model)
        wanted = [np.asarray(one.value) for one in state(model)]
    for restores in (True, False):
        with hybrid() as (strategy, _):
            model = model_in(strategy, optimizer)
            if restores:
                fitted(model, epochs=1)
                sg.train.Checkpoint(model=model, optimizer=model.optimizer).restore(saved)
            else:
                with strategy.scope():
                    model.optimizer.build(model.trainable_variables)
                model.load_weights(tmp_path / "made.weights.h5")
            assert int(model.optimizer.iterations) == 6
            np.testing.assert_allclose(model.predict(X, verbose=0), predicted, rtol=1e-5)
            fitted(model)
            for one, value in zip(state(model), wanted, strict=True):
                np.testing.assert_allclose(one.value, value, rtol=1e-5, atol=1e-6)


def test_killed_server_goes_on_from_its_journal(tmp_path) -> None:
    dies: Any = OneThatDies(tmp_path)
    with hybrid({"users": "server"}, cluster=dies) as (strategy, _):
        with strategy.scope():
            users = sg.Variable(np.zeros(2, "float32"), name="users")
            other = sg.Variable(np.zeros(2, "float32"), name="other")
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 10.0])
            optimizer = keras.optimizers.SGD(rate)
            optimizer.build([users, other])

        def step() -> None:
            optimizer.apply([np.float32([1, 2])] * 2, [users, other])

        strategy.run(step)
        strategy.placement.remote.variables.secure()
        strategy.run(step)  # which is lost
        dies.server.restart()
        with pytest.warns(RuntimeWarning, match="this process has seen that 1 update was lost"):
            strategy.run(step)
        # The server counts as this process does: the third update has the first rate still.
        np.testing.assert_array_equal(other.value, [-6, -12])
        np.testing.assert_array_equal(users.value, [-4, -8])
        strategy.run(step)
        np.testing.assert_array_equal(other.value, [-26, -52])
        np.testing.assert_array_equal(users.value, [-24, -48])


def test_initial_rows_of_a_large_table_are_made_on_the_servers(mixed, monkeypatch) -> None:
    strategy, _ = mixed
    monkeypatch.setattr("stratagem.parameter_server.keras.variable._MAX_LOCAL_BYTES", 1000)
    made: list[Any] = []
    client = strategy.placement.remote.variables.client
    create = client.create
    monkeypatch.setattr(client, "create", lambda *own: made.append(own[1]) or create(*own))
    tables: list[Any] = []
    for scope in (strategy.scope(), contextlib.nullcontext()):
        keras.utils.set_random_seed(5)
        with scope:
            tables.append(keras.layers.Embedding(NUM_USERS, 8, name="users"))
            tables[-1].build()
    assert [callable(one) for one in made] == [True]
    np.testing.assert_array_equal(tables[0].embeddings.value, tables[1].embeddings.value)


UNFIT: dict[str, Any] = {
    "averages": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "accumulates": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scales": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_optimizer_that_needs_whole_tables_is_refused(mixed, name) -> None:
    strategy, _ = mixed
    with strategy.scope():
        table = sg.Variable(np.zeros(2, "float32"), name="users")
        optimizer = UNFIT[name]()
        optimizer.build([table])
    with pytest.raises(
        NotImplementedError, match=r"uses averaged variables \(EMA\), gradient accumulation"
    ):
        strategy.run(lambda: optimizer.apply([np.float32([1, 2])], [table]))


def test_arguments_of_servers_need_a_rule(tmp_path) -> None:
    for name, value in {"num_servers": 2, "journal_dir": tmp_path}.items():
        given: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"A HybridStrategy received {name}="):
            sg.HybridStrategy(TWO, placement={"users": "central"}, **given)
    with pytest.raises(ValueError, match="HybridStrategy received num_servers=0"):
        sg.HybridStrategy(TWO, placement={"users": "server"}, num_servers=0)
    with pytest.raises(TypeError, match="cluster_resolver=3 is of type int"):
        sg.HybridStrategy(TWO, placement={"users": "server"}, cluster_resolver=3)  # pyright: ignore[reportArgumentType]
    with sg.HybridStrategy(TWO, placement={"users": "central"}) as strategy:
        assert strategy.placement.remote is None


def test_cluster_is_one_of_a_chief_and_servers() -> None:
    spec = sg.ClusterSpec({"chief": ["a:1"], "ps": ["b:1", "c:1"]})
    plan = ClusterPlan.servers_only(spec, "chief", None)
    assert (plan.num_workers, plan.num_servers, plan.spec) == (0, 2, spec)
    with pytest.raises(ValueError, match="num_servers=3 was passed for a cluster with 2 ps"):
        ClusterPlan.servers_only(spec, "chief", 3)
    with_workers = sg.ClusterSpec({"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]})
    for cluster, task in ((spec, "ps"), (with_workers, "chief")):
        with pytest.raises(ValueError, match="A HybridStrategy was created in a task of type"):
            ClusterPlan.servers_only(cluster, task, None)
    assert ClusterPlan.servers_only(sg.ClusterSpec({}), None, None).num_servers == 2


def test_model_that_moves_there_trains(mixed) -> None:
    strategy, _ = mixed
    x, y = RNG.normal(size=(12, 3)).astype("float32"), Y[:12]
    models: list[keras.Model] = []
    for where in (None, strategy):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(2, name="users"), keras.layers.Dense(1)]
        models.append(keras.Sequential([keras.Input((3,)), *layers]))
        optimizer = keras.optimizers.Adam(0.1)
        sg.compile(models[-1], distribute=where, optimizer=optimizer, loss="mse")
        models[-1].fit(x, y, **{**FIT, "batch_size": 4})
    assert "users" in "".join(strategy.placement.remote.variables.named)
    assert_equal(models[1], models[0])


def test_step_begins_with_what_was_assigned_a_moment_ago(mixed) -> None:
    strategy, _ = mixed
    with strategy.scope():
        users = sg.Variable(np.zeros(2, "float32"), name="users")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([users])

    def step() -> Any:
        before = users.value
        optimizer.apply([np.float32([1, 1])], [users])
        return before

    strategy.run(step)  # which brings the values after it along
    users.assign([5.0, 6.0])
    before = strategy.reduce("mean", strategy.run(step), axis=None)
    np.testing.assert_array_equal(before, [5, 6])
    np.testing.assert_array_equal(users.value, [3, 4])
