"""Trains on all workers, and profiles worker 1: `python profiled.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import keras
import numpy as np

import stratagem as sg

folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((64, 16), "float32"), np.ones((64, 1), "float32")
profile = sg.profile(steps=(2, 5), folder=folder, workers=[1])
model.fit(x, y, batch_size=8, verbose=0, callbacks=[profile])
num_steps = profile.summary.num_steps if profile.summary else 0
(folder / f"process-{jax.process_index()}.txt").write_text(str(num_steps))
