"""A training that is ended and begun again, in one process or as a program of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import stratagem as sg

BATCH_SIZE = 8
X = np.random.default_rng(0).random((50, 4)).astype("float32")
X[:, 0] = np.arange(len(X))
Y = X[:, 1:].sum(axis=1)
NUM_BATCHES = 7  # the last one is short
EPOCHS = 3


class AccidentError(Exception):
    """Ends a training."""


class EndAt(keras.callbacks.Callback):
    """Raises when so many groups of batches are done; counted over all epochs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count -= 1
        if not self.count:
            raise AccidentError


class EndAtBegin(EndAt):
    """As `EndAt`, when the next batch begins."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count -= 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.count:
            raise AccidentError


class Seen(keras.layers.Layer):
    """Notes which examples each step trains with; the first feature is their number."""

    def build(self, shape: Any) -> None:
        table = (NUM_BATCHES * EPOCHS, BATCH_SIZE)
        self.examples = self._own(table, -1)
        self.num_steps = self._own((), 0)

    def _own(self, shape: Any, value: int) -> Any:
        initializer = keras.initializers.Constant(value)
        return self.add_weight(
            shape=shape, initializer=initializer, dtype="int32", trainable=False, autocast=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            numbers = keras.ops.cast(x[None, :, 0], "int32")
            place = keras.ops.stack([self.num_steps.value, keras.ops.zeros((), "int32")])
            self.examples.assign(keras.ops.slice_update(self.examples.value, place, numbers))
            self.num_steps.assign(self.num_steps.value + 1)
        return x[:, 1:]


def strategy_named(name: str) -> Any:
    if name == "none":
        return None
    if name == "one":
        return sg.OneDeviceStrategy("cpu:0")
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def build(strategy: Any, **compiled: Any) -> keras.Model:
    """What a program does first: the same each time."""
    keras.utils.set_random_seed(3)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.8)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        is_one = strategy is None or strategy.num_replicas_in_sync == 1
        first = Seen() if is_one else keras.layers.Rescaling([0.0, 1.0, 1.0, 1.0])
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4,)), first, *layers])
        options = {"optimizer": keras.optimizers.Adam(schedule), "metrics": ["mae"]} | compiled
        model.compile(loss="mse", **options)
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    """Everything that a training leaves in variables."""
    return [np.asarray(one.value) for one in (*model.variables, *model.optimizer.variables)]


def assert_same(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"value {index}")


def ended_and_again(run: Callable[..., Any], *ends: Any) -> Any:
    """Runs until each of the callbacks ends it, and then to its end; returns what that does."""
    for end in ends:
        try:
            run(end)
        except AccidentError:
            continue
        raise AssertionError("the training was not ended")
    return run()
