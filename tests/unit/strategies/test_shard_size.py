"""Copies of sharded state, each shared by some of the replicas."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.training.model import lower_training_step
from tests.unit.strategies.decoders import (
    LAYOUTS,
    WORDS,
    compiled_decoder,
    fit_decoder,
    largest_difference,
)

NAMES = [f"cpu:{index}" for index in range(8)]
QUICK = [(4, 2, "all", 1, 1), (2, 2, "all", 2, 2)]
TABLE = [
    (data, shard, shard_state, model, steps)
    for data, shard, model in [(4, 2, 1), (2, 4, 1), (2, 2, 1), (2, 2, 2)]
    for shard_state in ("optimizer", "all")
    for steps in (1, 2)
]


def strategy_of(
    data: int, shard: int, shard_state: str | None = "all", model: int = 1
) -> sg.MirroredStrategy:
    return sg.MirroredStrategy(
        NAMES[: data * shard * model],
        shard_state=shard_state,
        shard_size=shard,
        devices_per_replica=model if model > 1 else None,
        layout_map=LAYOUTS if model > 1 else None,
    )


def rule() -> keras.optimizers.Optimizer:
    # The usual epsilon makes numbers of rounding errors where gradients are almost zero.
    return keras.optimizers.Adam(1e-3, epsilon=1e-4, global_clipnorm=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "shard", "shard_state", "model", "steps"),
    [row if row in QUICK else pytest.param(*row, marks=pytest.mark.slow) for row in TABLE],
)
def test_training_is_that_of_one_device(data, shard, shard_state, model, steps) -> None:
    strategy = strategy_of(data, shard, shard_state, model)
    trained = compiled_decoder(strategy.scope(), rule(), 1, steps_per_execution=steps)
    losses = fit_decoder(trained)
    alone = compiled_decoder(sg.OneDeviceStrategy("cpu:0").scope(), rule(), 1)
    np.testing.assert_allclose(losses, fit_decoder(alone), rtol=1e-5)
    assert largest_difference(trained, alone) < 1e-5


def test_each_copy_is_on_adjacent_replicas() -> None:
    with strategy_of(2, 4).scope():
        weight = sg.Variable(np.arange(64 * 32, dtype="float32").reshape(64, 32))
    shards = {one.device.id: one for one in weight.stored.addressable_shards}
    assert [shards[index].data.shape for index in range(8)] == [(16, 32)] * 8
    for rank in range(4):
        np.testing.assert_array_equal(shards[rank].data, weight.numpy()[16 * rank :][:16])
        np.testing.assert_array_equal(shards[rank].data, shards[4 + rank].data)


def test_an_axis_need_only_be_divisible_by_the_shards_of_one_copy() -> None:
    with strategy_of(4, 2).scope():
        weight = sg.Variable(np.ones((1026, 3), "float32"))
    assert weight.stored.addressable_shards[0].data.shape == (513, 3)


def test_only_sums_of_shards_cross_between_copies() -> None:
    with strategy_of(2, 4).scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(256, use_bias=False)])
        model.compile("sgd", "mse")
    batch = np.ones((16, 512), "float32"), np.ones((16, 256), "float32")
    text = lower_training_step(model, batch).compile().as_text()
    within = "{{0,1,2,3},{4,5,6,7}}"
    assert _messages(text, "all-gather") == [("512,256", within)]
    assert _messages(text, "reduce-scatter") == [("128,256", within)]
    sums = [groups for size, groups in _messages(text, "all-reduce") if size == "128,256"]
    assert sums == ["{{0,4},{1,5},{2,6},{3,7}}"]
    assert "512,256" not in dict(_messages(text, "all-reduce"))


def _messages(text: str, kind: str) -> list[tuple[str, str]]:
    """Returns shapes and devices of the messages of a kind."""
    row = rf"f32\[([\d,]*)\]\S* {kind}\(.*?replica_groups=(\{{\{{.*?\}}\}}|mesh\[.*?\}}|\[\S*)"
    # JAX 0.12 names the axis of the mesh instead of the devices.
    axes = {"shard": "{{0,1,2,3},{4,5,6,7}}", "replica": "{{0,4},{1,5},{2,6},{3,7}}"}
    named = {f"mesh['replica'=2,'shard'=4] {{'{axis}'}}": ids for axis, ids in axes.items()}
    return [(shape, named.get(groups, groups)) for shape, groups in re.findall(row, text)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_of_a_table_are_exchanged_within_a_copy(optimizer: str) -> None:
    ids = np.random.default_rng(0).integers(0, 8192, (24, 2), dtype="int32")
    y = np.random.default_rng(1).random((24, 1), "float32")

    def trained(strategy: sg.Strategy) -> keras.Model:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(8192, 8)]
            model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
        model.fit(ids, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        return model

    one, several = trained(sg.OneDeviceStrategy("cpu:0")), trained(strategy_of(2, 2))
    assert several.weights[0].stored.addressable_shards[0].data.shape == (4096, 8)
    assert largest_difference(several, one) < 1e-5


@pytest.mark.slow
def test_checkpoint_is_opened_with_other_sizes(tmp_path) -> None:
    first = compiled_decoder(strategy_of(2, 2).scope(), rule(), 1)
    first.optimizer.build(first.trainable_variables)
    for seed, variable in enumerate([*first.weights, *first.optimizer.variables[2:]]):
        variable.assign(np.random.default_rng(seed).normal(scale=0.1, size=variable.shape))
    sg.Checkpoint(model=first).write(tmp_path / "state")
    second = compiled_decoder(strategy_of(1, 4).scope(), rule(), 1)
    second.optimizer.build(second.trainable_variables)
    sg.Checkpoint(model=second).read(tmp_path / "state")
    assert largest_difference(second, first) == 0
    first.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    expected = first.predict(WORDS, verbose=0)
    np.testing.assert_allclose(plain.predict(WORDS, verbose=0), expected, rtol=1e-4, atol=1e-5)


def test_replica_functions_gather_and_sum_over_all_replicas() -> None:
    strategy = strategy_of(2, 2)

    def step() -> Any:
        context: Any = sg.get_replica_context()
        rank = keras.ops.cast(context.replica_id_in_sync_group, "float32")
        return context.all_reduce("sum", rank + 1.0), context.all_gather(rank[None], 0)

    for run in (strategy.run, sg.function(strategy.run)):
        total, ranks = run(step)
        assert [float(one) for one in strategy.experimental_local_results(total)] == [10.0] * 4
        for one in strategy.experimental_local_results(ranks):
            np.testing.assert_array_equal(one, [0, 1, 2, 3])


def test_all_replicas_share_one_copy_or_each_has_its_own() -> None:
    with strategy_of(1, 4).scope():
        shared = sg.Variable(np.ones((64, 32), "float32"))
    with strategy_of(4, 1).scope():
        copied = sg.Variable(np.ones((64, 32), "float32"))
    assert shared.stored.addressable_shards[0].data.shape == (16, 32)
    assert copied.stored.addressable_shards[0].data.shape == (64, 32)


@pytest.mark.slow
def test_plan_keeps_the_copies() -> None:
    with strategy_of(2, 4).scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024)])
        model.compile("sgd", "mse")
    batch = np.ones((32, 512), "float32"), np.ones((32, 1024), "float32")
    plan = sg.plan(model, batch, "16xH100")
    assert plan.memory.parameters_bytes == (512 * 1024 + 1024) * 4 // 4


@pytest.mark.parametrize("size", [3, 0, -2, 16, 2.0, "4"])
def test_size_that_does_not_divide_the_replicas_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"shard_size=.* for 8 replicas.\n.*\[1, 2, 4, 8\]"):
        sg.MirroredStrategy(NAMES, shard_state="all", shard_size=size)


def test_size_without_sharded_state_is_refused() -> None:
    with pytest.raises(ValueError, match="shard_size=4 was given, and nothing is sharded"):
        sg.MirroredStrategy(NAMES, shard_size=4)
