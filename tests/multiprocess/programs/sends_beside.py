"""Streaming DiLoCo of several processes: `python sends_beside.py ISLAND FOLDER`.

ISLAND is the argument `replicas_per_island`. Each process trains with sends in the step's program
and beside it, and writes all state of each to FOLDER/process-N.npz. On one machine the sends would
go through memory, in the step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

replicas_per_island, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import stratagem as sg  # noqa: E402
from stratagem.devices import background  # noqa: E402
from stratagem.keras.numerics import local_weights as fragment_sends  # noqa: E402

rng = np.random.default_rng(0)
x = rng.normal(size=(92, 32)).astype("float32")
y = rng.normal(size=(92, 64)).astype("float32")
fragment_sends.is_connected = lambda topology: False
most_in_flight = 0


class Sends(keras.callbacks.Callback):
    """Counts the sends that run beside a step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        global most_in_flight
        most_in_flight = max(most_in_flight, len(background.background_flights))


def made(method: sg.local_updates.LocalUpdates) -> Any:
    keras.utils.set_random_seed(0)
    strategy = sg.LocalUpdateStrategy(method, replicas_per_island=replicas_per_island)
    with strategy.scope():
        layers = [
            keras.layers.Input((32,)),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(64),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.02), "mse")
    return strategy, model


def fit(method: sg.local_updates.LocalUpdates) -> Any:
    """Epochs of 8 steps end between a send and its end, and an evaluation follows."""
    _, model = made(method)
    for _ in range(2):
        model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[Sends()])
        model.evaluate(x, y, batch_size=46, verbose=0)
    return model


def loop(method: sg.local_updates.LocalUpdates) -> Any:
    """Steps with a sum over all replicas in them."""
    strategy, model = made(method)
    loss_fn = keras.losses.MeanSquaredError(reduction=None)

    def step(batch: Any) -> Any:
        inputs, targets = batch

        def loss() -> Any:
            return sg.compute_average_loss(loss_fn(targets, model(inputs, training=True)))

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        context = sg.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", value)

    dataset = sg.input.Dataset((x, y), batch_size=12)
    for _ in range(2):
        for batch in strategy.distribute_dataset(dataset):
            strategy.run(step, args=(batch,))
    return model


def state_of(model: Any) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(one.storage.addressable_data(0)) for one in variables]


streaming = sg.local_updates.StreamingDiLoCo
ways = {
    "fit": (fit, streaming(period=4, fragments=2, overlap=3)),
    "fit int8": (fit, streaming(period=6, fragments=3, overlap=4, compression="int8")),
    "loop": (loop, streaming(period=4, fragments=2, overlap=2, warmup_steps=2)),
}
found: dict[str, np.ndarray] = {}
beside = fragment_sends.runs_beside
for name, (train, method) in ways.items():
    for is_beside in (False, True):
        fragment_sends.runs_beside = beside if is_beside else lambda strategy: False
        before = most_in_flight
        for place, value in enumerate(state_of(train(method))):
            found[f"{name} {is_beside} {place}"] = value
        assert is_beside or most_in_flight == before
assert most_in_flight > 0
np.savez(folder / f"process-{jax.process_index()}.npz", **found)
