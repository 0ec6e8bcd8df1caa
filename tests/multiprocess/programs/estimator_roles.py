"""Trains an Estimator on the workers and evaluates it beside them: one script for all tasks.

`python estimator_roles.py FOLDER`: each task leaves what it knows in FOLDER. The chief's clock says
when all save, and the chief ends the training of all after its 30th question.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np

import stratagem as sg
from stratagem import estimator as est

folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy()
x = np.random.default_rng(7).normal(size=(32, 3)).astype("float32")
y = (x @ np.array([[1.0], [-2.0], [0.5]], "float32")).astype("float32")
questions: list[int] = []


def model_fn(features, labels, mode):
    outputs = keras.layers.Dense(1, kernel_initializer="zeros")(features)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    train_op = est.minimize(keras.optimizers.SGD(0.05), loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def is_enough() -> bool:
    questions.append(len(questions) + 1)
    return questions[-1] == 30


config = est.RunConfig(str(folder / "model"), save_checkpoints_secs=0.2, train_distribute=strategy)
estimator = est.Estimator(model_fn, config=config)
early = est.make_early_stopping_hook(estimator, is_enough, None, 1)
last = est.FinalOpsHook("global_step")
train_fn = est.numpy_input_fn(x, y, 4, None, shuffle=False)
eval_fn = est.numpy_input_fn(x, y, 8, shuffle=False)
metrics, _ = est.train_and_evaluate(
    estimator,
    est.TrainSpec(train_fn, 1000, hooks=[last, early]),
    est.EvalSpec(eval_fn, steps=None, start_delay_secs=0, throttle_secs=0),
)
told = {
    "metrics": None if metrics is None else {name: float(n) for name, n in metrics.items()},
    "last step": None if last.final_ops_values is None else int(last.final_ops_values),
    "questions": len(questions),
}
(folder / f"{config.task_type}{config.task_id}.json").write_text(json.dumps(told))
