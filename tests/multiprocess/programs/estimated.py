"""An Estimator of digits: one program for all tasks of a cluster.

`python estimated.py FOLDER MAX_STEPS STRATEGY`: STRATEGY is a name of `sg`, or "" for what a
cluster with parameter servers trains with by itself. Each task tells in FOLDER what it has seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import stratagem as sg

NUM_TRAINED = 1500
BATCH_SIZE = 30
SAVE_STEPS = 20


def data() -> tuple[np.ndarray, np.ndarray]:
    """The images as numbers from 0 to 1, and the digits."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels.astype("int32")


def model_fn(features: Any, labels: Any, mode: str) -> sg.estimator.EstimatorSpec:
    """A dense classifier, whose first weights are always the same."""
    initializer = keras.initializers.GlorotUniform
    hidden = keras.layers.Dense(16, "relu", kernel_initializer=initializer(seed=1))(features)
    logits = keras.layers.Dense(10, kernel_initializer=initializer(seed=2))(hidden)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    accuracy.update_state(labels, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    return sg.estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=sg.estimator.minimize(keras.optimizers.SGD(0.05, momentum=0.9), loss),
        eval_metric_ops={"accuracy": accuracy},
    )


def train_fn(input_context: sg.InputContext) -> Any:
    """Batches of one replica, each of the rows that are this worker's, again and again."""
    images, labels = data()
    pipeline, count = input_context.input_pipeline_id, input_context.num_input_pipelines
    start = 0
    while True:
        rows = range(start + pipeline * BATCH_SIZE, start + (pipeline + 1) * BATCH_SIZE)
        picked = np.array(rows) % NUM_TRAINED
        yield images[picked], labels[picked]
        start += count * BATCH_SIZE


def eval_fn() -> sg.input.Dataset:
    """What is held out, with a short batch at the end."""
    images, labels = data()
    return sg.input.Dataset((images[NUM_TRAINED:], labels[NUM_TRAINED:]), batch_size=40)


class Paced(sg.estimator.SessionRunHook):
    """Tells each step, and keeps a pace at which a test can kill."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_run(self, run_context: Any, run_values: Any) -> None:
        with self._path.open("a") as file:
            file.write(f"{run_context.session.global_step}\n")
        time.sleep(0.02)


def estimator_of(folder: Path, strategy: str = "") -> sg.estimator.Estimator:
    """The Estimator whose checkpoints are in a folder."""
    config = sg.estimator.RunConfig(
        model_dir=str(folder / "model"),
        save_checkpoints_steps=SAVE_STEPS,
        keep_checkpoint_max=None,
        train_distribute=getattr(sg, strategy) if strategy else None,
    )
    return sg.estimator.Estimator(model_fn, config=config)


def main(estimator: sg.estimator.Estimator, folder: Path, max_steps: int) -> None:
    """Plays the part of this process's task."""
    task = f"{estimator.config.task_type}-{estimator.config.task_id}"
    paced = Paced(folder / f"{task}-{os.getpid()}.steps")
    metrics, _ = sg.estimator.train_and_evaluate(
        estimator,
        sg.estimator.TrainSpec(train_fn, max_steps, hooks=[paced]),
        sg.estimator.EvalSpec(eval_fn, steps=None, start_delay_secs=0, throttle_secs=0),
    )
    told = {name: float(value) for name, value in (metrics or {}).items()}
    (folder / f"{task}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(estimator_of(FOLDER, sys.argv[3]), FOLDER, int(sys.argv[2]))
