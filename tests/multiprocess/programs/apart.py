"""Assigns outside steps on one worker alone, in the way of its argument: `python apart.py HOW`.

`all` assigns in all ways that are right, on all workers, or without a lasting change.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg

how = sys.argv[1]
strategy = sg.MultiWorkerMirroredStrategy()
rank = jax.process_index()
is_chief = rank == 0
callbacks = keras.callbacks
x = np.ones((8, 1), "float32")


def made() -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=3)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model: keras.Model, *of_model: keras.callbacks.Callback, epochs: int = 2) -> None:
    options = {"validation_data": (x, 3 * x), "batch_size": 4, "verbose": 0, "epochs": epochs}
    model.fit(x, 3 * x, callbacks=list(of_model), **options)


def step() -> jax.Array:
    return model.layers[0].kernel + 0


class PerBatch(keras.callbacks.Callback):
    """A warm-up."""

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)


model = made()
if how == "all":
    if is_chief:  # process 0's initial values are those of all, also where it has loaded them
        with strategy.scope():
            chosen = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            chosen.set_weights([np.full((2, 2), 5.0), np.full(2, 6.0)])
    else:
        with strategy.scope():
            chosen = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    assert np.all(np.asarray(chosen.weights[0]) == 5.0)
    assert np.all(np.asarray(chosen.weights[1]) == 6.0)
    fit(model, PerBatch(), callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    fit(model, callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9))
    fit(model, callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True))
    fit(model, callbacks.SwapEMAWeights(swap_on_epoch=True))
    folder = Path(sg.collectives.host.broadcast_object(tempfile.mkdtemp()))
    fit(model, sg.BackupAndRestore(str(folder / "backup")))
    fit(model, sg.BackupAndRestore(str(folder / "backup")), epochs=4)
    model.save_weights(folder / "at.weights.h5")
    checkpoint = sg.train.Checkpoint(model=model)
    path = checkpoint.save(folder / "at")
    model.load_weights(folder / "at.weights.h5")
    checkpoint.restore(path)
    model.set_weights(model.get_weights())
    # Seeds and sums of metrics are each process's own; averages come and go.
    before = model.layers[0].get_weights()
    if is_chief:
        keras.random.normal((2,))
        model.layers[2](x, training=True)
        model.reset_metrics()
        model.layers[0].set_weights([2 * value for value in before])
        model.layers[0].set_weights(before)
        model.optimizer.learning_rate = float(model.optimizer.learning_rate.numpy())
    fit(model)
    for value in (1.0, jnp.float32(2.0), np.float32(3.0)):
        model.optimizer.learning_rate.assign(value)
        strategy.run(step)
    model.layers[0].bias.assign_add(np.ones(3))
    fit(model)
else:
    fit(model)
    if how == "rate of a callback":
        plateau = callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9)
        fit(model, *([plateau] if is_chief else []), epochs=4)
    elif how == "warm-up":
        fit(model, *([PerBatch()] if rank == 1 else []), epochs=4)
    elif how == "weights":
        if rank == 1:
            model.layers[0].set_weights([np.ones((1, 3)), np.ones(3)])
        fit(model)
    elif how == "one value in a loop":
        for _ in range(3):
            if rank == 1:
                model.layers[0].kernel.assign_add(np.full((1, 3), 0.5))
            strategy.run(step)
    elif how == "unequal values":
        model.layers[0].bias.assign(np.full(3, rank))
        model.save(Path(tempfile.gettempdir()) / "never.keras")
    elif how == "statistics":
        model.layers[1].moving_mean.assign(np.full(3, 7.0)) if is_chief else None
        model.evaluate(x, x, verbose=0)
    elif how == "at the end":
        if rank == 1:
            model.layers[0].bias.assign(np.ones(3))
        print("value", np.asarray(model.layers[0].bias)[0])
print("done")
