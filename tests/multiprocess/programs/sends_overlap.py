"""Steps while a fragment is under way: `python sends_overlap.py FOLDER`, of two processes.

Worker 1 starts its part of a send only when worker 0, which has started its own, has ended the next
step. So nothing would go on if that step waited for the send.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

folder = Path(sys.argv[1])
os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import stratagem as sg  # noqa: E402
from stratagem.devices.background import background_flights  # noqa: E402
from stratagem.execution.programs import followed_program  # noqa: E402
from stratagem.keras.numerics import local_weights as fragment_sends  # noqa: E402

fragment_sends.is_connected = lambda topology: False
start_beside = followed_program.start_beside
flag = folder / "step has ended"
num_sends = 0


def start_late(*args: Any) -> Any:
    global num_sends
    num_sends += 1
    if num_sends == 2 and jax.process_index() == 1:
        while not flag.exists():
            time.sleep(0.01)
    return start_beside(*args)


followed_program.start_beside = start_late
method = sg.local_updates.StreamingDiLoCo(period=4, fragments=1, overlap=2)
strategy = sg.LocalUpdateStrategy(method)
with strategy.scope():
    # Large enough not to run in the thread that starts it.
    layers = [keras.layers.Input((4,)), keras.layers.Dense(1000), keras.layers.Dense(500)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)


def step(x: Any, y: Any) -> Any:
    def loss() -> Any:
        return keras.ops.mean((model(x) - y) ** 2)

    value, gradients = sg.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


dataset = sg.input.Dataset((np.ones((48, 4)), np.ones((48, 500))), batch_size=4)
for number, batch in enumerate(strategy.distribute_dataset(dataset), start=1):
    result = strategy.run(step, args=batch)
    jax.block_until_ready(strategy.experimental_local_results(result))
    if number == 9 and jax.process_index() == 0:  # fragments are sent after steps 4 and 8
        assert len(background_flights) == 1
        assert not background_flights[0].token.is_ready()
        flag.touch()
assert num_sends == 3
print("done", float(keras.ops.sum(model.trainable_variables[0])))
