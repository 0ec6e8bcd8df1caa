"""What `compression="auto"` says on each process: `python compression_advice.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax
import keras
import numpy as np

import stratagem as sg

found: dict[str, object] = {}
for name in ("AUTO", "RING"):
    options = sg.CommunicationOptions(implementation=name, compression="auto")
    strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 256)), np.ones((8, 512)), batch_size=4, verbose=0)
    found[name] = list(strategy.describe(model).advice)
folder = Path(sys.argv[1])
(folder / f"process-{jax.process_index()}.json").write_text(json.dumps(found))
