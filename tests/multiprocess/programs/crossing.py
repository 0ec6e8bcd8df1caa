"""Saves under one strategy, and restores what was saved under others.

`python crossing.py PLACE save FOLDER` trains, saves FOLDER/PLACE-1 and goes on;
`python crossing.py PLACE restore FOLDER` restores each FOLDER/*-1 and goes on from it. What came of
going on is written to FOLDER/PLACE.npz and FOLDER/PLACE-from-ORIGIN.npz, by process 0.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import stratagem as sg

place, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
strategy: Any = {
    "none": lambda: None,
    "one_device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored_2": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_3": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "workers_2": sg.MultiWorkerMirroredStrategy,
}[place]()
rows = np.random.default_rng(0).random((120, 6)).astype("float32")
targets = (rows**2).sum(axis=1, keepdims=True)


class Training:
    """A model with Adam's slots and moving statistics, and a variable on each replica."""

    def __init__(self, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.layers.Input((6,)),
                    keras.layers.Dense(8, "tanh"),
                    keras.layers.BatchNormalization(synchronized=True),
                    keras.layers.Dense(1),
                ]
            )
            self.model.compile(keras.optimizers.Adam(0.01), "mse")
            if strategy is None:
                self.total: Any = keras.Variable(0.0)
                self.mean: Any = keras.Variable(0.0)
            else:
                self.total = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
                self.mean = sg.Variable(0.0, synchronization="on_read", aggregation="mean")
        self.checkpoint = sg.train.Checkpoint(model=self.model, total=self.total, mean=self.mean)

    def go_on(self) -> dict[str, Any]:
        losses: list[float] = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
        )
        self.model.fit(rows, targets, batch_size=12, shuffle=False, verbose=0, callbacks=[callback])

        def count() -> None:
            replicas = 1 if strategy is None else strategy.num_replicas_in_sync
            self.total.assign_add(12.0 / replicas)
            self.mean.assign_add(1.0)

        for _ in range(10):
            count() if strategy is None else strategy.run(count)
        return {
            "losses": np.array(losses),
            "predictions": self.model.predict(rows, verbose=0),
            "total": np.asarray(self.total.value),
            "mean": np.asarray(self.mean.value),
            "slots": np.concatenate(
                [np.ravel(variable.value) for variable in self.model.optimizer.variables]
            ),
        }


if task == "save":
    training = Training(1)
    training.go_on()
    training.checkpoint.save(folder / place)
    found = {place: training}
else:
    found = {}
    for path in sorted(folder.glob("*-1")):
        training = Training(2)
        training.model.fit(rows[:12], targets[:12], verbose=0)  # whatever it was before
        training.checkpoint.restore(path)
        found[f"{place}-from-{path.name.removesuffix('-1')}"] = training
for name, training in found.items():
    predictions = training.model.predict(rows, verbose=0)
    results = {**training.go_on(), "before": predictions}
    if jax.process_index() == 0:
        np.savez(folder / f"{name}.npz", **results)
