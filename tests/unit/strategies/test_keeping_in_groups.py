"""Replicas of several devices whose variables are kept elsewhere: the numbers of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

PAIRS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
HOST = "cpu:4"
NUM_WORDS = 9000  # large enough for rows to travel
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, NUM_WORDS, (11, 3), dtype="int32")
WORDS[::2, 0] = 5
Y = RNG.normal(size=(11, 4)).astype("float32")
WEIGHTS = RNG.uniform(0.2, 2.0, size=11).astype("float32")


def layouts_of_keras() -> Any:
    """What a user of Keras's own ModelParallel has; the axis is as long as a group."""
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], PAIRS[0])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*words/embeddings"] = (None, "model")
    layouts[".*hidden/kernel"] = (None, "model")
    layouts[".*hidden/bias"] = ("model",)
    return layouts


STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "central": lambda: sg.CentralStorageStrategy(PAIRS, HOST),
    "hybrid": lambda: sg.HybridStrategy(
        PAIRS,
        placement={"embeddings": "sharded", "hidden": "central"},
        parameter_device=HOST,
    ),
    "all state": lambda: sg.MirroredStrategy(PAIRS, shard_state="all"),
    "state of the optimizer": lambda: sg.MirroredStrategy(PAIRS, shard_state="optimizer"),
    "layouts": lambda: sg.MirroredStrategy(PAIRS, layout_map=layouts_of_keras()),
}


def made(scope: AbstractContextManager[Any], optimizer: str, steps: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(NUM_WORDS, 8, name="words"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, "tanh", name="hidden"),
                keras.layers.Dense(4),
            ]
        )
        rule = getattr(keras.optimizers, optimizer)(0.05, global_clipnorm=1.0)
        model.compile(rule, "mse", metrics=["mae"], steps_per_execution=steps)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "steps"),
    [
        ("central", "Adagrad", 2),
        ("central", "Adam", 1),
        ("hybrid", "Adagrad", 1),
        ("hybrid", "Adagrad", 2),
        ("hybrid", "Adam", 1),
        ("all state", "Adagrad", 2),
        ("all state", "Adam", 1),
        ("state of the optimizer", "Adagrad", 2),
        ("layouts", "Adam", 1),
    ],
)
def test_training_is_that_of_one_device(name, optimizer, steps) -> None:
    """Eleven rows in batches of four: the last part of the last batch is empty."""
    fit: Any = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False}
    one = made(contextlib.nullcontext(), optimizer, 1)
    own = made(STRATEGIES[name]().scope(), optimizer, steps)
    wanted, got = (
        model.fit(WORDS, Y, sample_weight=WEIGHTS, **fit).history for model in (one, own)
    )
    for metric, values in wanted.items():
        np.testing.assert_allclose(got[metric], values, rtol=1e-5)
    for expected, variable in zip(
        [*one.weights, *one.optimizer.variables],
        [*own.weights, *own.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(
        own.evaluate(WORDS, Y, verbose=0), one.evaluate(WORDS, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        own.predict(WORDS, verbose=0), one.predict(WORDS, verbose=0), atol=2e-6
    )
