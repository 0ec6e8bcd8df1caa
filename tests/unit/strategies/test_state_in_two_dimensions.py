"""State sharded over replicas and over a replica's devices: the numbers of one device."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.strategies.decoders import (
    LAYOUTS,
    WORDS,
    compiled_decoder,
    fit_decoder,
    largest_difference,
)

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # The usual epsilon makes numbers of rounding errors where gradients are almost zero.
    "Adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4, global_clipnorm=1.0),
}
SIZES = (1, 2, 4)
TABLE = [
    (optimizer, replicas, model, shard_state)
    for optimizer in OPTIMIZERS
    for replicas in SIZES
    for model in SIZES
    for shard_state in (None, "optimizer", "all")
    if 1 < replicas * model <= 8 and (replicas > 1 or shard_state is None)
]
QUICK = [("momentum", 2, 2, "all"), ("Adam", 2, 4, "optimizer")]


def strategy_of(replicas: int, model: int, shard_state: str | None) -> sg.Strategy:
    names = [f"cpu:{index}" for index in range(replicas * model)]
    return sg.MirroredStrategy(
        names, devices_per_replica=model, shard_state=shard_state, layout_map=LAYOUTS
    )


@functools.cache
def alone(optimizer: str) -> tuple[keras.Model, list[float]]:
    model = compiled_decoder(contextlib.nullcontext(), OPTIMIZERS[optimizer]())
    return model, fit_decoder(model)


def assert_like_one_device(strategy: sg.Strategy, optimizer: str, **options: Any) -> keras.Model:
    model = compiled_decoder(strategy.scope(), OPTIMIZERS[optimizer](), **options)
    losses = fit_decoder(model)
    reference, expected = alone(optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert largest_difference(model, reference) < 1e-5
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "replicas", "model", "shard_state"),
    [row if row in QUICK else pytest.param(*row, marks=pytest.mark.slow) for row in TABLE],
)
@pytest.mark.filterwarnings("ignore:Variable 'attention_0/key/kernel':UserWarning")
def test_training_is_that_of_one_device(optimizer, replicas, model, shard_state) -> None:
    assert_like_one_device(strategy_of(replicas, model, shard_state), optimizer)


@pytest.mark.slow
def test_steps_in_one_call_are_those_of_one_device() -> None:
    assert_like_one_device(strategy_of(2, 2, "all"), "Adam", steps_per_execution=2)


def test_a_device_holds_a_part_of_each_dimension() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled_decoder(
            strategy_of(2, 4, "all").scope(), keras.optimizers.Adam(), num_layers=1
        )
        model.optimizer.build(model.trainable_variables)
    texts = [str(one.message) for one in caught if "layout_map" in str(one.message)]
    assert len(texts) == 1  # key and value heads
    assert "'attention_0/key/kernel' of shape (64, 2, 16) cannot be divided" in texts[0]
    assert "2 over 4 devices (axis 1, 'logical'), which leaves 2 parts" in texts[0]
    assert "A device holds 4.0 KiB of it instead of 2.0 KiB" in texts[0]
    held = {}
    for variable in [*model.weights, *model.optimizer.variables]:
        parts = variable.stored.addressable_shards
        held[variable.path] = np.prod(variable.shape) / np.prod(parts[0].data.shape)
    for name in (
        "logits/kernel",
        "words/embeddings",
        "attention_0/query/kernel",
        "up_0/kernel",
        "down_0/kernel",
    ):
        assert held[name] == 8
        slots = [path for path in held if path.endswith(f"{name.replace('/', '_')}_momentum")]
        assert [held[path] for path in slots] == [8]
    assert held["attention_0/key/kernel"] == 4
    assert held["logits/kernel"] == 8  # no rule, so that it is in parts as other state is
    assert held["up_0/bias"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("opened_in", [(4, 1, None), (4, 2, "optimizer")])
def test_checkpoint_is_opened_by_other_shapes(tmp_path, opened_in) -> None:
    build = functools.partial(compiled_decoder, num_layers=1)
    first = build(strategy_of(2, 2, "all").scope(), OPTIMIZERS["momentum"]())
    second = build(strategy_of(*opened_in).scope(), OPTIMIZERS["momentum"]())
    for model in (first, second):
        model.optimizer.build(model.trainable_variables)
    for seed, variable in enumerate([*first.weights, *first.optimizer.variables[2:]]):
        variable.assign(np.random.default_rng(seed).normal(scale=0.1, size=variable.shape))
    sg.Checkpoint(model=first).write(tmp_path / "state")
    sg.Checkpoint(model=second).read(tmp_path / "state")
    assert largest_difference(second, first) == 0
    second.set_weights([np.zeros(one.shape) for one in first.weights])
    second.set_weights(first.get_weights())
    assert largest_difference(second, first) == 0
    if opened_in[1] == 1:
        first.save(tmp_path / "model.keras")
        plain = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(
            plain.predict(WORDS, verbose=0), first.predict(WORDS, verbose=0), rtol=1e-4, atol=1e-5
        )


def test_replica_function_run_op_by_op_gives_the_same() -> None:
    strategy = sg.MirroredStrategy(
        [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]],
        shard_state="all",
        layout_map={"kernel": (None, "logical")},
    )
    with strategy.scope():
        kernel = sg.Variable(
            np.ones((64, 32)), name="kernel", aggregation=sg.VariableAggregation.SUM
        )

    def step() -> Any:
        rank = sg.get_replica_context().replica_id_in_sync_group
        kernel.assign_add(keras.ops.full((64, 32), 1.0 + keras.ops.cast(rank, "float32")))
        return keras.ops.sum(kernel.value)

    strategy.run(step)
    compiled = np.asarray(kernel)
    kernel.assign(np.ones((64, 32)))
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    np.testing.assert_array_equal(kernel, compiled)
    np.testing.assert_array_equal(compiled, np.full((64, 32), 4.0))


@pytest.mark.slow
def test_map_of_keras_is_taken_as_it_is() -> None:
    """Weights by both axes, as in KerasHub's maps; the mesh says what a replica is."""
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["words/embeddings"] = ("model", "batch")
    layouts[".*/(query|key|value)/kernel"] = ("model", "batch", None)
    layouts[".*/attention_output/kernel"] = ("model", None, "batch")
    layouts["up_[0-9]/kernel"] = ("batch", "model")
    layouts["down_[0-9]/kernel"] = ("model", "batch")
    model = assert_like_one_device(sg.MirroredStrategy(layout_map=layouts), "Adam")
    (up,) = [one for one in model.weights if one.path == "up_0/kernel"]
    assert {shard.data.shape for shard in up.stored.addressable_shards} == {(32, 64)}
