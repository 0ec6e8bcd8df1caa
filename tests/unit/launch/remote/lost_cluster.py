"""Coordinator on a Ray cluster of its own, which loses one of Ray's processes during `fit`.

Arguments: folder of the backup; the name of the process to kill after two epochs, or "" for none.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np
import psutil

from stratagem import environment
from stratagem.cluster.addresses import free_ports
from stratagem.launch.remote.ray_nodes import start_head


class Kill(keras.callbacks.Callback):
    """Kills a process of Ray, and goes on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print(f"epoch {epoch}", flush=True)
        children = psutil.Process().children(recursive=True)
        for child in children if self._name and epoch == 2 else ():
            if child.name().startswith(self._name):
                child.kill()
        if self._name and epoch >= 2:
            time.sleep(0.5)  # so that the loss is noticed before the last epoch


def main(folder: str, name: str) -> None:
    with start_head(f"127.0.0.1:{free_ports(1)[0]}") as head:
        environment.set_defaults({"RAY_ADDRESS": head.head_address})
        with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
            with strategy.scope():
                layers = [
                    keras.layers.Input((3,)),
                    keras.layers.Dense(1, kernel_initializer="ones"),
                ]
                model = keras.Sequential(layers)
                model.compile(keras.optimizers.SGD(1e-2), "mse", steps_per_execution=2)
            x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
            backup = sg.BackupAndRestore(Path(folder) / "backup", save_freq="epoch")
            model.fit(x, x[:, :1], 4, 40, 0, callbacks=[backup, Kill(name)], shuffle=False)
            print("weights", *model.layers[-1].kernel.numpy().ravel(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
