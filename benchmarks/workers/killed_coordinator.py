"""Ours: a coordinator that trains until it is killed, and goes on from the journals of its servers.

Its argument is the folder of the journals. It prints a JSON object a line: how it began, and then
again and again how many updates the servers have made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras

from benchmarks.workers.served_models import make_mlp
from benchmarks.workloads import WORKLOADS

_TELL_EVERY_S = 0.1


class _Told(keras.callbacks.Callback):
    """Tells how many updates were made."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.time() > self._told_s + _TELL_EVERY_S:
            self._told_s = time.time()
            model: Any = self.model
            _tell(iterations=int(model.optimizer.iterations))


def _tell(**fields: Any) -> None:
    print("told " + json.dumps({**fields, "at_s": time.time()}), flush=True)


def main() -> None:
    """Trains for ever."""
    _tell(pid=os.getpid())
    strategy = sg.ParameterServerStrategy(num_workers=2, num_servers=2, journal_dir=sys.argv[1])
    x, y = WORKLOADS["mlp"].arrays()
    model = make_mlp(strategy)
    servers = strategy.placement.remote.variables.client.describe().values()
    _tell(restored=[told["restored_version"] for told in servers])
    model.fit(x, y, batch_size=128, epochs=10**6, verbose=0, callbacks=[_Told()])


if __name__ == "__main__":
    main()
