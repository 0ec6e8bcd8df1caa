"""Trains on the workers and evaluates beside them: one script for all tasks.

`python evaluated.py FOLDER EPOCHS`: the workers leave checkpoints and what `fit` measured in
FOLDER, the evaluator what it measured. After the first epoch training waits for the evaluator.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import keras
from sklearn.datasets import load_digits

import stratagem as sg

_DEADLINE_S = 60

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
checkpoints, first_seen = folder / "checkpoints", folder / "first_seen"
strategy = sg.MultiWorkerMirroredStrategy()
images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16
held_out = images[600:701], labels[600:701]
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


class _Tells(keras.callbacks.Callback):
    def on_test_end(self, logs: Any = None) -> None:
        first_seen.touch()


class _WaitsForEvaluator(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not first_seen.exists():
            assert time.monotonic() < deadline_s, "no evaluator"
            time.sleep(0.01)


if strategy.cluster_resolver.task_type == "evaluator":
    evaluator = sg.SidecarEvaluator(model, held_out, checkpoints, callbacks=[_Tells()], poll_s=0.1)
    measured = [{"epoch": one.epoch, "step": one.step, **one.logs} for one in evaluator.start()]
    told = {"was stopped": evaluator.was_stopped, "evaluations": measured}
    (folder / "evaluator.json").write_text(json.dumps(told))
else:
    history = model.fit(
        images[:600],
        labels[:600],
        batch_size=60,
        epochs=epochs,
        validation_data=held_out,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                checkpoints / "ckpt-{epoch:04d}.weights.h5", save_weights_only=True
            ),
            _WaitsForEvaluator(),
        ],
    )
    if jax.process_index() == 0:
        (folder / "trainer.json").write_text(json.dumps(history.history))
