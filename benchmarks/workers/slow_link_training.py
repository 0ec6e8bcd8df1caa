"""One of two workers that train over a link: `python -m ... {"task": .., "method": .., ..}`.

Each question asks for a number of steps; the answer tells their seconds and the bytes sent, without
those of the validation that may follow.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.slow_links.links import sent_bytes
from benchmarks.workers.protocol import serve_questions

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import keras
import numpy as np

from benchmarks.slow_links.methods import Method
from benchmarks.slow_links.models import TASKS

__all__ = ["make_strategy", "prepare"]

_VALIDATION_BATCH = 128


class _Clock(keras.callbacks.Callback):
    """Seconds, CPU seconds and sent bytes of the steps of one call of `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.cpu_s, self.num_bytes = 0.0, 0.0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._start_bytes, self._start_cpu_s = sent_bytes(), time.process_time()
        self._start_s = time.perf_counter()

    def on_train_end(self, logs: Any = None) -> None:
        model: Any = self.model
        jax.block_until_ready([one.value for one in model.trainable_variables])
        self.seconds = time.perf_counter() - self._start_s
        self.cpu_s = time.process_time() - self._start_cpu_s
        self.num_bytes = sent_bytes() - self._start_bytes


def make_strategy(method: Method) -> sg.Strategy:
    """Returns the strategy of a method, over the processes of the cluster."""
    if method.kind == "lockstep":
        options = sg.CommunicationOptions(compression=method.compression)
        return sg.MultiWorkerMirroredStrategy(communication_options=options)
    settings: dict[str, Any] = {"period": method.period, "compression": method.compression}
    if method.outer_momentum is not None:
        settings["outer_momentum"] = method.outer_momentum
    return sg.LocalUpdateStrategy(getattr(sg.local_updates, method.kind)(**settings))


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes the model; returns what trains it on."""
    options = json.loads(sys.argv[1])
    task = TASKS[options["task"]]
    strategy = make_strategy(Method(**options["method"]))
    with strategy.scope():
        model: Any = task.compiled_model(options["steps"])
    examples = task.examples()
    place = options["first_steps"] * task.batch_size
    if options["weights"]:
        with np.load(options["weights"]) as stored:
            model.set_weights([stored[name] for name in stored.files])

    def train(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal place
        clock = _Clock()
        begin, place = place, place + question["steps"] * task.batch_size
        part = examples.part(begin, place)
        history: Any = model.fit(
            *part, batch_size=task.batch_size, shuffle=False, verbose=0, callbacks=[clock]
        )
        told = {
            "steps": question["steps"],
            "seconds": clock.seconds,
            "cpu_s": clock.cpu_s,
            "num_bytes": clock.num_bytes,
            "loss": history.history["loss"][-1],
        }
        if question["validates"]:
            told["validation_loss"] = model.evaluate(
                examples.validation_x,
                examples.validation_y,
                batch_size=_VALIDATION_BATCH,
                verbose=0,
            )
        if "save" in question:
            np.savez(question["save"], *model.get_weights())
        told["parameters"] = model.count_params()
        return told

    return train


if __name__ == "__main__":
    serve_questions(prepare)
