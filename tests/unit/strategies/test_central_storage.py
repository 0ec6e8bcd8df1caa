"""CentralStorageStrategy: one copy of the variables, the same numbers as copies on all devices."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.keras.training.model import lower_training_step
from tests.unit.strategies.decoders import (
    LAYOUTS,
    WORDS,
    compiled_decoder,
    fit_decoder,
    largest_difference,
)

TWO, HOST = ["cpu:0", "cpu:1"], "cpu:2"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
Y = RNG.normal(size=(22, 2)).astype("float32")


def central() -> sg.CentralStorageStrategy:
    return sg.CentralStorageStrategy(TWO, HOST)


def made(strategy: sg.Strategy, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, activation="tanh", kernel_constraint="max_norm"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(2, kernel_regularizer="l2"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def parameter_device_of(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        (device,) = devices_of(sg.Variable(1.0).value)
    return device


def devices_of(value: Any) -> set[Any]:
    return value.devices()


def test_fit_gives_what_copies_on_all_devices_give() -> None:
    models = [
        made(strategy, steps_per_execution=3) for strategy in (sg.MirroredStrategy(TWO), central())
    ]
    histories = [
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
        for model in models
    ]
    mirrored, own = models
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    for wanted, got in zip(
        mirrored.weights + mirrored.optimizer.variables,
        own.weights + own.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_allclose(got.value, wanted.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        own.evaluate(X, Y, verbose=0), mirrored.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(own.predict(X, verbose=0), mirrored.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.slow
def test_variables_are_on_the_parameter_device_before_and_after_steps() -> None:
    model = made(central())
    (host,) = [device for device in jax.devices() if device.id == 2]
    for num_kept in (9, 21):
        kept = [v for v in model.variables if v.synchronization != "on_read"]
        kept += model.optimizer.variables
        assert len(kept) == num_kept
        for variable in kept:
            assert devices_of(variable.stored) == {host}, variable.path
            assert devices_of(variable.value) == {host}, variable.path
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.slow
def test_devices_hold_nothing_between_steps() -> None:
    """Counted by device after a step: the weights and what Adam keeps, three large arrays."""
    sizes = {}
    shape = (517, 1031)  # of nothing else in this process
    for name, strategy in {"mirrored": sg.MirroredStrategy(TWO), "central": central()}.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input(shape[:1]), keras.layers.Dense(shape[1])])
            model.compile("adam", "mse")
        model.fit(np.zeros((4, shape[0])), np.zeros((4, shape[1])), batch_size=4, verbose=0)
        held = Counter(
            shard.device.id
            for array in jax.live_arrays()
            if array.shape == shape
            for shard in array.addressable_shards
        )
        sizes[name] = dict(held)
        del model
        gc.collect()
    assert sizes == {"mirrored": {0: 3, 1: 3}, "central": {2: 3}}


def test_functions_and_runs_op_by_op_see_the_same_values() -> None:
    strategy = central()
    with strategy.scope():
        value = sg.Variable(1.0, aggregation="sum")

    def step():
        value.assign_add(1.0 * jnp.ones(()))

    @sg.function
    def twice():
        strategy.run(step)
        strategy.run(step)
        return value.value

    assert float(twice()) == 5.0
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    strategy.run(step)
    assert float(value.value) == 9.0
    assert {device.id for device in devices_of(value.stored)} == {2}


@pytest.mark.slow
def test_model_is_called_where_variables_are() -> None:
    model = made(central())
    model.fit(X, Y, batch_size=8, verbose=0)
    called = model(X)
    assert {device.id for device in devices_of(called)} == {2}
    np.testing.assert_allclose(called, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_parameter_device_is_the_host_or_the_only_device() -> None:
    several = sg.CentralStorageStrategy(TWO)
    assert parameter_device_of(several) == jax.local_devices(backend="cpu")[0]
    assert parameter_device_of(sg.CentralStorageStrategy("cpu:3")).id == 3
    assert sg.CentralStorageStrategy().num_replicas_in_sync == jax.local_device_count()


def test_parameter_device_is_where_variables_live() -> None:
    extended = central().extended
    assert [device.id for device in extended.parameter_devices] == [2]
    assert [device.id for device in extended.worker_devices] == [0, 1]


def test_host_that_jax_leaves_out_is_reported(monkeypatch) -> None:
    devices = jax.devices()[:2]

    def without_host(**_: Any) -> Any:
        raise RuntimeError("Unknown backend: 'cpu' requested")

    monkeypatch.setattr(jax, "local_devices", without_host)
    with pytest.raises(ValueError, match="JAX was told to leave the host out: Unknown backend"):
        sg.CentralStorageStrategy(devices)


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\[\] is empty"):
        sg.CentralStorageStrategy([])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(["cpu:99"])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(TWO, "cpu:99")
    with pytest.raises(TypeError, match=r"compute_devices=3 is of type int"):
        sg.CentralStorageStrategy(3)  # pyright: ignore[reportArgumentType]


# Copies of sharded state, each shared by some of the replicas.

NAMES = [f"cpu:{index}" for index in range(8)]


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
    [
        (4, 2, "all", 1, 1),
        (2, 4, "optimizer", 1, 1),
        (2, 2, "all", 2, 2),
        (2, 2, "optimizer", 2, 1),
        (2, 4, "all", 1, 2),
    ],
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


# Experts divided over the devices of a replica: the numbers of one device, nothing gathered.

WIDTH, INNER, NUM_EXPERTS = 8, 24, 4
OF_EXPERTS = {".*/experts_(in|out)": ("logical", None, None)}
TOKENS, TARGETS = np.random.default_rng(11).normal(size=(2, 8, 6, WIDTH)).astype("float32")


class Experts(keras.layers.Layer):
    """Two experts of four for each token, with a loss that balances them over the global batch."""

    def build(self, input_shape: Any) -> None:
        self.router = self.add_weight((WIDTH, NUM_EXPERTS), name="router")
        self.inner = self.add_weight((NUM_EXPERTS, WIDTH, INNER), name="experts_in")
        self.outer = self.add_weight((NUM_EXPERTS, INNER, WIDTH), name="experts_out")

    def call(self, x: Any) -> Any:
        shares = ops.softmax(ops.matmul(x, self.router))
        best, numbers = ops.top_k(shares, 2)
        chosen = ops.one_hot(numbers, NUM_EXPERTS)
        gates = ops.sum(chosen * best[..., None], axis=-2)
        self.add_loss(balance_loss(chosen, shares))
        hidden = ops.silu(ops.einsum("btd,edf->ebtf", x, self.inner))
        return ops.einsum("ebtf,efd,bte->btd", hidden, self.outer, gates)


def balance_loss(chosen: Any, shares: Any) -> Any:
    """Returns the product of how often experts are chosen, over all replicas, and their shares."""
    frequencies = ops.mean(chosen, axis=(0, 1, 2))
    context = sg.get_replica_context()
    if context is not None:
        frequencies = context.all_reduce("mean", frequencies)
    return NUM_EXPERTS * ops.sum(frequencies * ops.mean(shares, axis=(0, 1)))


def made_experts(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential([keras.Input((6, WIDTH)), Experts(name="block")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def trained(scope: contextlib.AbstractContextManager[Any]) -> tuple[float, list[np.ndarray]]:
    model = made_experts(scope)
    history = model.fit(TOKENS, TARGETS, batch_size=4, verbose=0, shuffle=False)
    return history.history["loss"][0], model.get_weights()


@functools.cache
def alone() -> tuple[float, list[np.ndarray]]:
    return trained(contextlib.nullcontext())


def expert_strategy(replicas: int, parts: int, **options: Any) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(replicas * parts)]
    return sg.MirroredStrategy(names, devices_per_replica=parts, layout_map=OF_EXPERTS, **options)


@pytest.mark.parametrize(
    ("replicas", "parts", "options"),
    [
        (2, 2, {}),
        pytest.param(2, 4, {"shard_state": "all"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"sequence_axis": 1}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_those_of_one_device(replicas, parts, options) -> None:
    strategy = expert_strategy(replicas, parts, **options)
    loss, weights = trained(strategy.scope())
    expected_loss, expected = alone()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_experts_are_not_gathered() -> None:
    """Each device computes its experts, and replicas sum the gradients of one device's."""
    strategy = expert_strategy(2, 2)
    model = made_experts(strategy.scope())
    text = lower_training_step(model, (TOKENS[:4], TARGETS[:4])).compile().as_text()
    assert not re.findall(rf"f32\[{NUM_EXPERTS},[\d,]+\]\S* all-gather\(", text)
    assert f"f32[{NUM_EXPERTS},{WIDTH},{INNER}]" not in text
    assert f"f32[{NUM_EXPERTS // 2},{WIDTH},{INNER}]" in text
