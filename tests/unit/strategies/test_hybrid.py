"""HybridStrategy: some variables mirrored, some kept elsewhere, the numbers of one device."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.strategies.test_training import (
    ITEMS,
    NUM_ITEMS,
    NUM_USERS,
    RULES,
    TWO,
    USERS,
    fitted,
    hybrid,
    made,
)


def test_variables_and_what_the_optimizer_keeps_are_where_the_rules_say() -> None:
    model = made(hybrid(TWO, RULES), "Adagrad")
    model.optimizer.build(model.trainable_variables)
    places: dict[str, str] = {}
    for variable in [*model.weights, *model.optimizer.variables]:
        if variable.synchronization == "on_read":
            continue
        shards = variable.stored.addressable_shards
        devices = {shard.device.id for shard in shards}
        is_whole = shards[0].data.shape == tuple(variable.shape)
        place = "central" if devices == {4} else "mirrored" if is_whole else "sharded"
        is_model = variable.slot_of is None
        path = variable.path if is_model else variable.path.split("/")[-1]
        places[path] = place
        assert devices == ({4} if place == "central" else {0, 1})
    of_slots = {path: place for path, place in places.items() if path.endswith("accumulator")}
    of_model = {path: place for path, place in places.items() if "/" in path}
    assert {path: of_model[path] for path in of_model if not path.startswith("adagrad")} == {
        "users/embeddings": "central",
        "items/embeddings": "sharded",
        "norm/gamma": "mirrored",
        "norm/beta": "mirrored",
        "wide/kernel": "sharded",
        "wide/bias": "mirrored",
        "top/kernel": "mirrored",
        "top/bias": "mirrored",
    }
    assert of_slots == {
        "users_embeddings_accumulator": "central",
        "items_embeddings_accumulator": "sharded",
        "norm_gamma_accumulator": "mirrored",
        "norm_beta_accumulator": "mirrored",
        "wide_kernel_accumulator": "sharded",
        "wide_bias_accumulator": "mirrored",
        "top_kernel_accumulator": "mirrored",
        "top_bias_accumulator": "mirrored",
    }


@pytest.mark.parametrize(
    ("place", "devices"), [("central", {4}), ("sharded", {0, 1}), ("pinned_host", {0, 1})]
)
def test_rows_are_read_and_set_outside_of_steps(place, devices) -> None:
    with hybrid(TWO, {"table": place}).scope():
        table = keras.layers.Embedding(NUM_USERS, 8, name="table")
        table.build()
    value = np.asarray(table.embeddings.value)
    np.testing.assert_array_equal(table(np.array([5, 8191])), value[[5, 8191]])
    rows = sg.IndexedSlices(jax.numpy.ones((1, 8)), jax.numpy.array([5]))
    table.embeddings.scatter_add(rows)
    np.testing.assert_array_equal(table(np.array([5])), value[[5]] + 1)
    stored = table.embeddings.stored
    assert {device.id for device in stored.devices()} == devices
    assert (stored.sharding.memory_kind == "pinned_host") == (place == "pinned_host")


@pytest.mark.parametrize("place", [pytest.param("central", marks=pytest.mark.slow), "sharded"])
def test_rows_that_other_rows_ask_for_are_looked_up_in_the_whole_table(place) -> None:
    strategy = hybrid(TWO, {"embeddings": place})
    with strategy.scope():
        first, second = (keras.layers.Embedding(NUM_ITEMS, 8, name=name) for name in "ab")
        for layer in (first, second):
            layer.build()
        tables = [first.embeddings, second.embeddings]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(tables)
    starts = [np.array(table.value) for table in tables]

    def step(ids: Any) -> Any:
        def loss() -> Any:
            rows = first(ids)
            chosen = keras.ops.cast(keras.ops.sum(rows, -1) > 0, "int32")
            return keras.ops.sum(rows) + 2.0 * keras.ops.sum(second(chosen))

        value, grads = sg.value_and_grad(loss, tables)
        optimizer.apply_gradients(zip(grads, tables, strict=True))
        return value

    ids = ITEMS[:3]
    rows = starts[0][ids]
    chosen = (rows.sum(-1) > 0).astype(int)
    values = strategy.local_results(strategy.run(step, args=(ids,)))
    wanted = rows.sum() + 2 * starts[1][chosen].sum()
    np.testing.assert_allclose(values, [wanted, wanted], rtol=1e-5)
    np.subtract.at(starts[0], ids, 2.0)  # of two replicas
    np.subtract.at(starts[1], chosen, 4.0)
    for table, value in zip(tables, starts, strict=True):
        np.testing.assert_allclose(table.value, value, rtol=1e-5)
    (program,) = strategy.executor.programs
    (lookup,) = program.trace.lookups
    assert lookup.table is first.embeddings


@pytest.mark.slow
def test_rules_that_match_nothing_are_reported_when_training_starts() -> None:
    rules = {sg.placement.at_least_bytes(2**40): "sharded", "users": "central"}
    fitted(made(sg.HybridStrategy(TWO, placement=rules), "SGD"))  # a size need not match
    model = made(hybrid(TWO, {"users": "central", "artists": "sharded"}), "SGD")
    model.predict([USERS, ITEMS], verbose=0)
    with pytest.raises(ValueError, match=r"rules that match no variable: 'artists'.*users/embed"):
        fitted(model)


def test_large_table_that_cannot_be_parted_is_reported() -> None:
    strategy = hybrid(TWO, {"table": "sharded"})
    with strategy.scope(), pytest.warns(UserWarning, match=r"\(9001, 9\) cannot be sharded over 2"):
        table = sg.Variable(np.zeros((9001, 9), "float32"), name="table")
    assert {shard.data.shape for shard in table.stored.addressable_shards} == {(9001, 9)}
    with strategy.scope():  # by columns
        table = sg.Variable(np.zeros((9001, 8), "float32"), name="table")
    assert {shard.data.shape for shard in table.stored.addressable_shards} == {(9001, 4)}


@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        (["users"], TypeError, "placement=.*is of type list"),
        ({"users": "host"}, ValueError, "the place 'host' for 'users'"),
        ({3: "central"}, TypeError, "the rule 3 of type int"),
        ({"users[": "central"}, ValueError, r"the pattern 'users\['"),
    ],
)
def test_wrong_placement_is_refused(placement, error, message) -> None:
    with pytest.raises(error, match=message):
        sg.HybridStrategy(TWO, placement=placement)


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(TypeError, match="devices=3 is of type int"):
        sg.HybridStrategy(3, placement={})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cpu:99"):
        sg.HybridStrategy(TWO, placement={}, parameter_device="cpu:99")
