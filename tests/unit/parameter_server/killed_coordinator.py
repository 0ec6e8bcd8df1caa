"""A coordinator that trains until it is killed.

Its argument is the folder of the journals. It prints with how many updates each server began, and
then again and again how many are in all journals, and how many there are.
"""

from __future__ import annotations

import sys
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np


class Told(keras.callbacks.Callback):
    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        journaled = [state["journaled_version"] or 0 for state in self._client.describe().values()]
        print("journaled", min(journaled), flush=True)
        model: Any = self.model
        print("iterations", int(model.optimizer.iterations), flush=True)


def main() -> None:
    strategy = sg.ParameterServerStrategy(num_workers=1, num_servers=2, journal_dir=sys.argv[1])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2), _Halves()])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    client = strategy.placement.remote.variables.client
    for state in client.describe().values():
        print("restored", state["restored_version"] or 0, flush=True)
    x = np.ones((32, 6), "float32")
    model.fit(x, x[:, :2], batch_size=4, epochs=10**6, verbose=0, callbacks=[Told(client)])


class _Halves(keras.layers.Layer):
    """A variable for the second server."""

    def build(self, input_shape: Any) -> None:
        self.factor = self.add_weight(shape=(200,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * keras.ops.mean(self.factor)


if __name__ == "__main__":
    main()
