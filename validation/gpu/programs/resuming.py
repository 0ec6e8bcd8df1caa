"""Trains with backups; the first try is killed in the third epoch, while a step runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import stratagem as sg
from validation.gpu.checks import device
from validation.gpu.models import digits, train

# isort: split
import jax
import keras
import numpy as np

jax.config.update("jax_default_matmul_precision", "highest")
folder, dies = sys.argv[1], sys.argv[2] == "dies"
is_first = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"


class Killer(keras.callbacks.Callback):
    """Kills this process soon after the third epoch has begun."""

    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch, flush=True)
        if epoch == 2 and dies and is_first:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


strategy = sg.MirroredStrategy([device()])
model = train(strategy, "mlp", epochs=0)
x, y = digits("mlp")
model.fit(
    x,
    y,
    batch_size=10,
    epochs=5,
    shuffle=False,
    verbose=0,
    callbacks=[sg.BackupAndRestore(folder), Killer()],
)
weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
np.save(f"{folder}.npy", weights)
print("RESULT", json.dumps({"devices": [str(one) for one in jax.devices()]}), flush=True)
