"""Layers with rows by key train like plain Keras layers over the same keys in a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.client.test_client import asked as asked
from tests.unit.parameter_server.client.test_client import kinds_in
from tests.unit.parameter_server.clusters import ThreadCluster, local_strategy
from tests.unit.parameter_server.strategy.test_table_servers import hybrid

RNG = np.random.default_rng(0)
NUM_KEYS, NUM_EXAMPLES, WIDTH = 13, 48, 3
# Each batch of 24 has every key, and most more than once, so that dense Adam changes the same rows.
KEYS = RNG.integers(-(2**63), 2**63, NUM_KEYS)
PLACES = np.concatenate([RNG.permutation(np.arange(72) % NUM_KEYS) for _ in range(2)]).reshape(
    NUM_EXAMPLES, WIDTH
)
IDS = KEYS[PLACES]
Y = RNG.normal(size=(NUM_EXAMPLES, 1)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 24, "epochs": 3, "shuffle": False, "verbose": 0}


def model_of(table: Any, inputs: Any, optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [inputs, table, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
    return model


def keyed_model(
    strategy: sg.Strategy, optimizer: Any, layer: dict[str, Any] | None = None, **options: Any
) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        table = sg.embedding.DynamicEmbedding(4, name="table", **(layer or {}))
        return model_of(table, keras.Input((WIDTH, 2), dtype="uint32"), optimizer, **options)


def plain_model(like: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    """The same model in plain Keras, with the rows and weights that `like` has now."""
    table = keras.layers.Embedding(NUM_KEYS, 4, name="table")
    model = model_of(table, keras.Input((WIDTH,), dtype="int32"), optimizer, **options)
    table.set_weights([rows_of(like)])
    model.layers[-1].set_weights([np.asarray(one) for one in like.layers[-1].weights])
    return model


def rows_of(model: keras.Model) -> np.ndarray:
    """The rows of all keys, in the order of `KEYS`."""
    table = model.get_layer("table")
    if isinstance(table, sg.embedding.DynamicEmbedding):
        return np.asarray(table(sg.embedding.keys(KEYS)))
    return np.asarray(table.embeddings)


def compare(strategy: sg.Strategy, optimizer: Callable[[], Any], **options: Any) -> keras.Model:
    """Fits both, and requires equal losses, rows and predictions. Returns the keyed one."""
    keyed = keyed_model(strategy, optimizer, **options)
    plain = plain_model(keyed, optimizer)
    x = sg.embedding.keys(IDS)
    losses = keyed.fit(x, Y, **FIT).history["loss"]
    expected = plain.fit(PLACES, Y, **FIT).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-5, atol=1e-6)
    found = keyed.evaluate(x, Y, verbose=0), keyed.predict(x, verbose=0)
    for one, other in zip(
        found, (plain.evaluate(PLACES, Y, verbose=0), plain(PLACES)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    return keyed


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.05),
}
DynamicEmbedding = sg.embedding.DynamicEmbedding


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """One worker with two replicas, and two servers."""
    with local_strategy(devices_per_worker=2) as made:
        yield made


@pytest.fixture(scope="module")
def in_lockstep() -> Iterator[Any]:
    placement = {"table": "server"}
    with hybrid(placement, cluster=ThreadCluster(2, [])) as (made, _):
        yield made


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("clipped", "lockstep"),
        pytest.param("adam", "worker", marks=pytest.mark.slow),
        pytest.param("clipped", "worker", marks=pytest.mark.slow),
        pytest.param("adagrad", "synchronous", marks=pytest.mark.slow),
        pytest.param("clipped", "op by op", marks=pytest.mark.slow),  # each is compiled alone
    ],
)
def test_fit_is_that_of_plain_keras(strategy, in_lockstep, name, place) -> None:
    optimizer = OPTIMIZERS[name]
    if place == "synchronous":
        with local_strategy(2, mode=UpdateMode(2)) as workers:
            compare(workers, optimizer)
    elif place == "op by op":
        with hybrid({"table": "server"}, ["cpu:0"], ThreadCluster(2, [])) as (one, _):
            compare(one, optimizer, run_eagerly=True)
    else:
        own = in_lockstep if place == "lockstep" else strategy
        model = compare(own, optimizer)
        table = sg.embedding.stats(own)[model.get_layer("table").embeddings.path]
        assert (table.rows, table.created) == (NUM_KEYS, NUM_KEYS)


@pytest.mark.slow
def test_layer_is_built_by_fit(strategy) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = DynamicEmbedding(1, combiner="sum")

        def call(self, keys: Any) -> Any:
            return self.table(keys)

    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse")
    model.fit(sg.embedding.keys(IDS[:8]), Y[:8], verbose=0)
    path = model.table.embeddings.path
    assert sg.embedding.stats(strategy)[path].rows == len(np.unique(IDS[:8]))


@pytest.mark.slow
def test_saved_weights_have_no_rows(strategy, tmp_path) -> None:
    model = keyed_model(strategy, OPTIMIZERS["adagrad"])
    model.fit(sg.embedding.keys(IDS[:8]), Y[:8], verbose=0)
    before = rows_of(model)
    model.save_weights(tmp_path / "saved.weights.h5")
    model.load_weights(tmp_path / "saved.weights.h5")
    assert model.get_layer("table").get_weights()[0].shape == (0, 4)
    np.testing.assert_array_equal(rows_of(model), before)


def test_assignment_is_an_error(strategy) -> None:
    model = keyed_model(strategy, OPTIMIZERS["adagrad"])
    table = model.get_layer("table").embeddings
    changes: list[Callable[[], object]] = [
        lambda: table.assign(np.ones((5, 4))),
        lambda: table.assign(table.value * 2),
        lambda: table.assign_add(1.0),
        lambda: table.assign_sub(table.value),
        lambda: model.set_weights(model.get_weights()),
    ]
    for change in changes:
        with pytest.raises(TypeError, match=r"was assigned a value\. Its shape has no rows"):
            change()


@pytest.mark.slow
def test_only_training_makes_rows(strategy) -> None:
    model = keyed_model(strategy, "sgd")
    before = rows_of(model)
    x = sg.embedding.keys(IDS)
    model.evaluate(x, Y, verbose=0)
    model.predict(x, verbose=0)
    path = model.get_layer("table").embeddings.path
    assert sg.embedding.stats(strategy)[path].rows == 0
    np.testing.assert_array_equal(rows_of(model), before)
    model.fit(x[:2], Y[:2], verbose=0)
    assert sg.embedding.stats(strategy)[path].rows == len(np.unique(IDS[:2]))


def test_step_is_one_pull_and_one_push_to_each_server(strategy, asked) -> None:
    with strategy.scope():
        inputs = keras.Input((3, 2), dtype="uint32")
        layers = [DynamicEmbedding(4, combiner="sum") for _ in range(5)]
        pooled = [layer(inputs) for layer in layers] + [layers[0](inputs)]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(pooled)))
        model.compile("sgd", "mse")
    x = sg.embedding.keys(IDS)
    model.fit(x, Y, **FIT)
    asked.clear()
    model.fit(x, Y, **FIT)
    num_steps, counts = 6, kinds_in(asked)
    for kind in ("pull_rows", "push"):
        assert [counts[kind, server] for server in range(2)] == [num_steps, num_steps]


def custom_step(model: keras.Model, x: Any, y: Any) -> Any:
    variables = model.trainable_variables
    loss = lambda: sg.compute_average_loss((model(x)[:, 0] - y[:, 0]) ** 2)  # noqa: E731
    value, gradients = sg.value_and_grad(loss, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return value


def parts_of(strategy: Any, array: np.ndarray) -> Any:
    parts = np.split(array, strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(
        lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
    )


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_loop_of_ones_own(strategy, in_lockstep, is_hybrid) -> None:
    own = in_lockstep if is_hybrid else strategy
    model = keyed_model(own, OPTIMIZERS["sgd"])
    plain = plain_model(model, OPTIMIZERS["sgd"])
    x = sg.embedding.keys(IDS)
    plain.fit(PLACES[:24], Y[:24], **{**FIT, "epochs": 2})

    def run() -> None:
        current = sg.get_strategy() if not is_hybrid else own
        parts = [parts_of(current, one[:24]) for one in (x, Y)]
        current.run(custom_step, args=(model, *parts))

    if is_hybrid:
        run()
        run()
    else:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        for _ in range(2):
            coordinator.schedule(run).fetch()
    np.testing.assert_allclose(rows_of(model), rows_of(plain), rtol=1e-5, atol=1e-6)


def test_padding_has_no_row_and_no_part() -> None:
    ids = np.where(np.arange(3) < np.array([3, 2, 1])[:, None], 5 + np.arange(3), 0)
    with local_strategy() as strategy:
        options: dict[str, Any] = {"combiner": "mean", "mask_zero": True}
        model = keyed_model(strategy, "sgd", options)
        table = model.get_layer("table")
        rows = np.asarray(table(sg.embedding.keys([[5], [6], [7]])))
        expected = [rows.mean(0), rows[:2].mean(0), rows[0]]
        np.testing.assert_allclose(table(sg.embedding.keys(ids)), expected, rtol=1e-5)
        model.fit(sg.embedding.keys(ids), Y[:3], verbose=0)
        (found,) = sg.embedding.stats(strategy).values()
        assert found.rows == 3


def test_mask_of_rows_that_are_not_pooled_and_weights_as_factors(strategy) -> None:
    with strategy.scope():
        layer = DynamicEmbedding(4, mask_zero=True)
    keys = sg.embedding.keys([["a", ""]])
    np.testing.assert_array_equal(layer.compute_mask(keys), [[True, False]])
    rows = layer(keys)
    assert np.all(np.asarray(rows)[0, 1] == 0)
    assert np.all(np.asarray(rows)[0, 0] != 0)
    with strategy.scope():
        layer = DynamicEmbedding(4, combiner="sum", initializer="ones")
    found = layer(sg.embedding.keys([[1, 2]]), jnp.asarray([[0.5, 2.0]]))
    np.testing.assert_allclose(found, np.full((1, 4), 2.5))


def test_policies_reach_the_servers(strategy) -> None:
    options = {"admission": sg.embedding.AfterSightings(2), "max_rows": 7}
    options["eviction"] = sg.embedding.LeastRecent()
    model = keyed_model(strategy, "sgd", options)
    x = sg.embedding.keys(IDS)
    path = model.get_layer("table").embeddings.path
    model.fit(x[:2], Y[:2], verbose=0)
    first = sg.embedding.stats(strategy)[path]
    assert (first.rows, first.refused_updates) == (0, len(np.unique(IDS[:2])))
    model.fit(x, Y, batch_size=2, verbose=0)
    found = sg.embedding.stats(strategy)[path]
    assert 0 < found.rows <= 7  # 4 rows of one server, and 3 of the other
    assert found.evicted == found.created - found.rows > 0


def test_config_is_that_of_an_equal_layer() -> None:
    layer = DynamicEmbedding(
        8,
        initializer=keras.initializers.RandomNormal(0.0, 0.1, seed=3),
        combiner="sqrtn",
        mask_zero=True,
        admission=sg.embedding.WithProbability(0.5),
        eviction=sg.embedding.NotSeenFor(100),
        max_rows=7,
        storage_dtype="int8",
        name="users",
    )
    copy: Any = keras.layers.deserialize(keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()
    assert (copy.admission, copy.eviction) == (layer.admission, layer.eviction)
    assert copy.compute_output_shape((None, 3, 2)) == (None, 8)


def test_mixed_precision_trains(strategy) -> None:
    model = keyed_model(strategy, "sgd", {"dtype": "mixed_bfloat16"})
    losses = model.fit(sg.embedding.keys(IDS), Y, **FIT).history["loss"]
    assert losses[-1] < losses[0]
    assert model.get_layer("table")(sg.embedding.keys(KEYS)).dtype == jnp.bfloat16


# Errors


def test_other_strategies_have_no_place_for_rows() -> None:
    for strategy in (sg.OneDeviceStrategy("cpu:0"), sg.MirroredStrategy(["cpu:0", "cpu:1"])):
        with strategy.scope(), pytest.raises(ValueError, match=r"was built under .*Strategy"):
            DynamicEmbedding(4).build()
    with pytest.raises(ValueError, match="DynamicEmbedding 'alone' was built under"):
        DynamicEmbedding(4, name="alone")(sg.embedding.keys([1]))
    with pytest.raises(ValueError, match=r"sg\.embedding\.stats received OneDeviceStrategy"):
        sg.embedding.stats(sg.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_dim": 0}, ValueError, "received output_dim=0"),
        ({"max_rows": 0}, ValueError, "received max_rows=0"),
        ({"combiner": "max"}, ValueError, "received combiner='max'"),
        ({"eviction": sg.embedding.LeastRecent()}, ValueError, ".* without max_rows"),
        ({"admission": 2}, TypeError, "received admission=2"),
        ({"eviction": sg.embedding.AfterSightings(2)}, TypeError, "received eviction="),
        ({"initializer": "glorot_normal"}, ValueError, "received the initializer"),
        ({"storage_dtype": "int4"}, ValueError, "received storage_dtype='int4'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=f"DynamicEmbedding {message}"):
        DynamicEmbedding(**{"output_dim": 4, **arguments})
    with pytest.raises(ValueError, match="TierOptions received memory_bytes=0"):
        sg.embedding.TierOptions(memory_bytes=0, folder="/disk")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bfloat16", "storage_dtype": "int8"}, "dtype bfloat16 have the storage_dtype"),
        ({"max_rows": 1}, "divides max_rows=1 over"),
    ],
)
def test_tables_that_servers_cannot_have_are_refused(strategy, arguments, message) -> None:
    with strategy.scope(), pytest.raises(ValueError, match=message):
        DynamicEmbedding(4, **arguments).build()


def test_rows_are_looked_up_by_keys_and_have_no_numbers(strategy) -> None:
    with strategy.scope():
        layer = DynamicEmbedding(4)
        layer.build()
    keys = sg.embedding.keys([[1, 2]])
    np.testing.assert_array_equal(sg.nn.embedding_lookup(layer.embeddings, keys), layer(keys))
    for ids in (jnp.arange(4), jnp.zeros((2, 3), "uint32"), jnp.zeros((2, 2), "int32")):
        with pytest.raises(TypeError, match="received ids of dtype"):
            layer(ids)
    with pytest.raises(ValueError, match="received weights, but has no combiner"):
        layer(keys[0], jnp.ones(2))
    rows = sg.IndexedSlices(jnp.ones((1, 4)), jnp.zeros(1, "int32"))
    for use in (
        lambda: layer.embeddings.take_rows([0]),
        lambda: layer.embeddings.scatter_add(rows),
    ):
        with pytest.raises(TypeError, match=r"Rows of the keyed table .* by number"):
            use()


def test_lookup_inside_a_loop_is_refused(in_lockstep) -> None:
    with in_lockstep.scope():
        layer = DynamicEmbedding(4)
        layer.build()

    def step(keys: Any) -> Any:
        return jax.lax.scan(lambda total, own: (total + layer(own).sum(), None), 0.0, keys)[0]

    with pytest.raises(ValueError, match=r"inside lax\.scan"):
        in_lockstep.run(step, args=(sg.embedding.keys([[1], [2]]),))


def test_gradient_that_was_changed_is_refused(in_lockstep) -> None:
    model = keyed_model(in_lockstep, "sgd")

    def step(keys: Any) -> None:
        variables = model.trainable_variables
        _, gradients = sg.value_and_grad(lambda: model(keys).sum(), variables)
        changed = [gradient * 2 for gradient in gradients]
        model.optimizer.apply_gradients(zip(changed, variables, strict=True))

    with pytest.raises(ValueError, match=r"of the keyed table .* that was changed"):
        in_lockstep.run(step, args=(sg.embedding.keys(IDS[:2]),))


@pytest.mark.slow
@pytest.mark.parametrize("storage_dtype", [None, "int8"])
def test_rows_on_disk_and_in_checkpoints(tmp_path, storage_dtype) -> None:
    """Most rows are on disk while training; a checkpoint has all of them, with the optimizer."""
    ids = sg.embedding.keys(np.arange(600).reshape(200, 3))

    def made(folder: str) -> tuple[DynamicEmbedding, keras.Model]:
        tiers = sg.embedding.TierOptions(memory_bytes=2_000, folder=str(tmp_path / folder))
        options = {"tiers": tiers, "storage_dtype": storage_dtype, "name": "t"}
        layer = DynamicEmbedding(4, initializer=keras.initializers.Zeros(), **options)
        model = keras.Sequential([keras.Input((3, 2), dtype="uint32"), layer])
        model.compile(keras.optimizers.Adagrad(0.5), "mse")
        model.optimizer.build(model.trainable_variables)
        assert layer.get_config()["tiers"] == {"memory_bytes": 2_000, "folder": tiers.folder}
        return layer, model

    def fit(model: keras.Model) -> None:
        y = np.ones((200, 3, 4))
        model.fit(ids, y, batch_size=40, epochs=2, shuffle=False, verbose=0)

    with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        with strategy.scope():
            layer, model = made("one")
        fit(model)
        ((_, table),) = sg.embedding.stats(strategy).items()
        assert table.rows == 600
        (described,) = strategy.placement.remote.variables.client.describe()[0]["tables"].values()
        assert described["hot"] < 200  # an update has 120
        rows = np.asarray(layer(ids))
        path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
        fit(model)
        later = np.asarray(layer(ids))
    with sg.ParameterServerStrategy(num_workers=1, num_servers=2) as strategy:
        with strategy.scope():
            other, model = made("two")
        sg.train.Checkpoint(model=model).restore(path).assert_consumed()
        np.testing.assert_array_equal(np.asarray(other(ids)), rows)
        fit(model)  # with the accumulators of the first one, and rounded by the same bits
        np.testing.assert_allclose(np.asarray(other(ids)), later, rtol=1e-5)
