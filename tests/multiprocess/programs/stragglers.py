"""A worker that is slow in some steps, as its arguments say.

Arguments: "elastic" or "mirrored", steps of an epoch, the width of the model, and slow workers
"WORKER:CAUSE:EPOCH:SECONDS". The cause is "input", "compute" (inside the program), or "host"
(between programs).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import stratagem as sg

_KIND, _NUM_STEPS, _WIDTH, *_SLOW = sys.argv[1:]
_STRATEGY = sg.MultiWorkerMirroredStrategy() if _KIND == "mirrored" else sg.ElasticStrategy()

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

_OWN = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
_ROWS = 24


class _Delays(keras.callbacks.Callback):
    """The delays of this worker in the present epoch."""

    def __init__(self, slow: list[str]) -> None:
        super().__init__()
        self._parts = [one.split(":") for one in slow]
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.sleep("host")

    def sleep(self, cause: str) -> None:
        """Sleeps if this worker is slow in that."""
        for worker, own, epoch, seconds in self._parts:
            if (int(worker), own, int(epoch)) == (_OWN, cause, self._epoch):
                time.sleep(float(seconds))


_delays = _Delays(_SLOW)


class _Rows(keras.utils.PyDataset):
    def __len__(self) -> int:
        return int(_NUM_STEPS)

    def __getitem__(self, index: int) -> Any:
        _delays.sleep("input")
        rows = np.random.default_rng(index).normal(size=(_ROWS, 8)).astype("float32")
        return rows, rows[:, :1]


class _Slow(keras.layers.Layer):
    """Passes values on, through a function of Python."""

    def call(self, x: Any) -> Any:
        def passed(array: Any) -> Any:
            _delays.sleep("compute")
            return array

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        same = jax.pure_callback(passed, shape, jax.lax.stop_gradient(x))
        return x + 0.0 * same


def main() -> None:
    """Trains."""
    with _STRATEGY.scope():
        layers: list[Any] = [keras.Input((8,))]
        if any(":compute:" in one for one in _SLOW):
            layers.append(_Slow())
        layers += [keras.layers.Dense(int(_WIDTH), "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    num_epochs = 1 + max((int(one.split(":")[2]) for one in _SLOW), default=0)
    model.fit(_Rows(), epochs=num_epochs, verbose=0, callbacks=[_delays])


if __name__ == "__main__":
    main()
