"""Two processes, of which worker 1 is lost in a send of a fragment: `python sends_lost.py HOW`.

HOW is "kill" or "stop". Worker 0 has started that send, and goes on with the next steps.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax
import keras
import numpy as np

import stratagem as sg
from stratagem.execution.programs import followed_program
from stratagem.keras.numerics import local_weights as fragment_sends

how = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sys.argv[1]]
fragment_sends.is_connected = lambda topology: False
start_beside = followed_program.start_beside
sent = 0


def start_or_end(*args: Any) -> Any:
    global sent
    sent += 1
    if sent == 3 and jax.process_index() == 1:
        os.kill(os.getpid(), how)
    return start_beside(*args)


followed_program.start_beside = start_or_end
method = sg.local_updates.StreamingDiLoCo(period=4, fragments=2, overlap=3)
with sg.LocalUpdateStrategy(method).scope():
    layers = [keras.layers.Input((4,)), keras.layers.Dense(500), keras.layers.Dense(500)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
model.fit(np.ones((160, 4)), np.ones((160, 500)), batch_size=4, verbose=0)
print("done")
