"""State that replicas share out: the numbers of copies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 8192, (22, 3), dtype="int32")
IDS[:, 0] = 5
Y = RNG.normal(size=(22, 1)).astype("float32")


def sharing(num_replicas: int, shard_state: str | None) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(num_replicas)]
    return sg.MirroredStrategy(names, shard_state=shard_state)


def trained(strategy: sg.Strategy, optimizer: str, steps: int) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(8192, 16),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(32, activation="relu", kernel_constraint="max_norm"),
                keras.layers.Dense(1),
            ]
        )
        rule = getattr(keras.optimizers, optimizer)(0.01, global_clipnorm=1.0)
        model.compile(rule, "mse", metrics=["mae"], steps_per_execution=steps)
    history = model.fit(IDS, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    return model, history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "num_replicas", "shard_state", "steps"),
    [
        ("Adam", 2, "all", 3),
        ("Adagrad", 2, "optimizer", 1),
        ("Adam", 4, "optimizer", 1),
        ("Adam", 4, "all", 1),
        ("SGD", 2, "all", 1),
        ("Lamb", 2, "all", 1),
        ("Muon", 2, "all", 1),
    ],
)
def test_numbers_are_those_of_copies(optimizer, num_replicas, shard_state, steps) -> None:
    copies, wanted = trained(sharing(num_replicas, None), optimizer, steps)
    parts, got = trained(sharing(num_replicas, shard_state), optimizer, steps)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5)
    for one, other in zip(
        [*copies.variables, *copies.optimizer.variables],
        [*parts.variables, *parts.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(other.value, one.value, rtol=1e-5, atol=1e-5, err_msg=one.path)
    np.testing.assert_allclose(
        parts.evaluate(IDS, Y, verbose=0), copies.evaluate(IDS, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        parts.predict(IDS, verbose=0), copies.predict(IDS, verbose=0), atol=1e-5
    )


@pytest.mark.slow
def test_state_survives_being_saved_by_one_and_restored_by_another(tmp_path) -> None:
    parts, _ = trained(sharing(2, "all"), "Adam", 1)
    sg.Checkpoint(model=parts).write(tmp_path / "state")
    copies, _ = trained(sharing(2, None), "Adam", 1)
    for variable in copies.weights:
        variable.assign(np.zeros(variable.shape))
    sg.Checkpoint(model=copies).read(tmp_path / "state")
    for one, other in zip(parts.variables, copies.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    for model in (parts, copies):
        model.fit(IDS, Y, batch_size=8, verbose=0, shuffle=False)
    for one, other in zip(parts.weights, copies.weights, strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-5, atol=1e-6)


def test_run_op_by_op_gives_the_same() -> None:
    strategy = sharing(2, "all")
    with strategy.scope():
        layer = keras.layers.Dense(64)
        layer.build((None, 32))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(layer.trainable_variables)

    def step():
        loss, grads = sg.value_and_grad(
            lambda: keras.ops.sum(layer(keras.ops.ones((2, 32))) ** 2), layer.trainable_variables
        )
        optimizer.apply_gradients(zip(grads, layer.trainable_variables, strict=True))
        return loss

    start = np.asarray(layer.kernel.value)
    strategy.run(step)
    compiled = np.asarray(layer.kernel.value)
    layer.kernel.assign(start)
    layer.bias.assign(np.zeros(64))
    for variable in optimizer.variables[2:]:
        variable.assign(np.zeros(variable.shape))
    optimizer.iterations.assign(0)
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    np.testing.assert_allclose(layer.kernel.value, compiled, rtol=1e-5)
    assert {shard.data.shape for shard in layer.kernel.stored.addressable_shards} == {(16, 64)}


def test_other_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="shard_state='weights' was given"):
        sharing(2, "weights")
    with pytest.raises(ValueError, match="shard_state='all' and a layout_map and a placement were"):
        sg.MultiWorkerMirroredStrategy(
            shard_state="all",
            layout_map={"kernel": (None, "logical")},
            placement={"kernel": "sharded"},
        )
    assert not sharing(1, "all").placement.uses_stores
