"""A model with state to shard, under the strategy that its option names."""

import sys

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

strategies = {"--workers": sg.MultiWorkerMirroredStrategy, "--central": sg.CentralStorageStrategy}
strategy = strategies.get(sys.argv[-1], sg.MirroredStrategy)()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(128, use_bias=False)])
    model.compile("adam", "mse")
print("evaluated", model.evaluate(np.ones((16, 128)), np.ones((16, 128)), verbose=0))
model.fit(np.ones((64, 128)), np.ones((64, 128)), batch_size=16, verbose=0)
