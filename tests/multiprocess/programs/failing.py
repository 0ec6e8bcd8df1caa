"""A loop of steps in which worker 1 does something wrong at step 5.

`python failing.py HOW LOOP`: HOW is what it does, LOOP whether the steps are of `fit`, by hand, or
over data of each process's own, for which the others wait ahead of their steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg

how, loop = sys.argv[1:]
strategy = sg.MultiWorkerMirroredStrategy()
is_culprit = jax.process_index() == int(os.environ.get("CULPRIT", "1"))


def step(x):
    return sg.get_replica_context().all_reduce("sum", jnp.sum(x))


def other_step(x):
    return sg.get_replica_context().all_reduce("sum", jnp.sum(x) * 2)


def misbehave() -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "stuck":
        time.sleep(600)
    elif how == "leave":
        sys.exit(0)
    elif how == "error":
        raise ValueError("a bug of one worker")
    elif how == "link down":
        device = os.environ["LINK"]
        subprocess.run(["ip", "link", "set", device, "down"], check=True)
    elif how == "other program":
        strategy.run(other_step, args=(values,))
    elif how == "save":
        model.save_weights("/nowhere/at.weights.h5")


class Misbehave(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if is_culprit and batch == 5:
            misbehave()


print("joined", flush=True)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if loop == "fit":
    data = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")
    if how == "other length" and is_culprit:
        data = tuple(part[:40] for part in data)
    model.fit(*data, batch_size=8, epochs=1, verbose=0, callbacks=[Misbehave()])
    if how == "other length":
        model.evaluate(*data, batch_size=8, verbose=0)
elif loop == "input":
    options = sg.InputOptions(per_replica_buffer_size=0 if is_culprit else 3)
    for number, batch in enumerate(
        strategy.distribute_datasets_from_function(
            lambda context: [np.ones(4, "float32")] * 10, options
        )
    ):
        if is_culprit and number == 5:
            misbehave()
        strategy.run(step, args=(batch,))
else:
    values = strategy.distribute_values_from_function(lambda context: np.ones(4, "float32"))
    for number in range(5 if how == "other length" and is_culprit else 10):
        if is_culprit and number == 5:
            misbehave()
        total = strategy.run(step, args=(values,))
    if how == "other length":
        strategy.run(other_step, args=(values,))
    print(strategy.local_results(total))
print("done", flush=True)
