"""Trains with each of Keras's callbacks: `python callbacks.py FOLDER`. Prints what each gave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np

import stratagem as sg

folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(24, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
c = keras.callbacks


def made():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.02, use_ema=True, ema_momentum=0.5), "mse")
    return model


makers = {
    "CSVLogger": lambda: c.CSVLogger(folder / "log.csv"),
    "EarlyStopping": lambda: c.EarlyStopping("loss", patience=0, min_delta=1e9),
    "LearningRateScheduler": lambda: c.LearningRateScheduler(lambda epoch, rate: rate / 2),
    "ModelCheckpoint": lambda: c.ModelCheckpoint(
        folder / "best.keras", "loss", save_best_only=True
    ),
    "ReduceLROnPlateau": lambda: c.ReduceLROnPlateau("loss", patience=0, min_delta=1e9),
    "SwapEMAWeights": lambda: c.SwapEMAWeights(swap_on_epoch=True),
    "TerminateOnNaN": lambda: c.TerminateOnNaN(),
    "BackupAndRestore": lambda: c.BackupAndRestore(folder / "backup"),
    "OrbaxCheckpoint": lambda: c.OrbaxCheckpoint(folder / "orbax"),
    "TensorBoard": lambda: object.__new__(c.TensorBoard),
}
results = {}
for name, make in makers.items():
    if not hasattr(c, name):
        continue
    model = made()
    try:
        model.fit(x, y, batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=[make()])
    except NotImplementedError as error:
        results[name] = str(error).splitlines()[2]
        continue
    weights = np.concatenate([np.ravel(weight.value) for weight in model.weights])
    results[name] = [len(model.history.epoch), weights.tolist()]
print(json.dumps(results))
