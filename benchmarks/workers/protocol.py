"""A worker's half of the conversation with the benchmark that started it.

The options come as JSON on the command line. The worker says it is ready; then each line on stdin
asks for a number of epochs, and each answer tells how long they took. The end of stdin ends it.
This module is imported first and imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = [
    "ANSWER_PREFIX",
    "Training",
    "WorkerOptions",
    "serve",
    "serve_questions",
    "versions_here",
]

# Lines without it are noise, for example of a sitecustomize that ran before this module.
ANSWER_PREFIX = "benchmark-answer "

_DISTRIBUTIONS = (
    "stratagem",
    "keras",
    "jax",
    "jaxlib",
    "tensorflow",
    "tensorflow-recommenders-addons",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "triton",
    "numpy",
    "orbax-checkpoint",
    "pyzmq",
    "ray",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker trains, and where.

    Args:
        workload: key of `benchmarks.workloads.WORKLOADS`.
        platform: "cpu" or "gpu".
        num_devices: devices of that platform.
        steps_per_call: `steps_per_execution`.
        data_on_device: whether the data lies on the device before the first step.
        steps_per_epoch: None for as many as the workload says.
        step_s: how long a step takes that stands in for training; None for real training.
        batch_size: of all devices together; None for as many as the workload says.
        pinned: whether each device is a process of its own, on a core of its own.
        callbacks: of `fit`: "" for none, "batches" for one on every batch, or "usual" for a
            progress bar, early stopping and TensorBoard.
        apart: whether such processes train a model each, without a word to one another.
        compiled: whether PyTorch compiles the model.
    """

    workload: str
    platform: str = "cpu"
    num_devices: int = 1
    steps_per_call: int = 1
    data_on_device: bool = False
    steps_per_epoch: int | None = None
    step_s: float | None = None
    batch_size: int | None = None
    pinned: bool = False
    callbacks: str = ""
    apart: bool = False
    compiled: bool = False

    @property
    def device_names(self) -> list[str]:
        return [f"{self.platform}:{index}" for index in range(self.num_devices)]


@dataclasses.dataclass(frozen=True)
class Training:
    """A prepared model.

    Args:
        run_epochs: trains for so many epochs, waits for the devices and returns the last loss.
        steps_per_epoch: steps in each.
        device_kind: what the devices are.
        end: called when nobody asks any more.
    """

    run_epochs: Callable[[int], float]
    steps_per_epoch: int
    device_kind: str = "CPU"
    end: Callable[[], None] = lambda: None


def serve(prepare: Callable[[WorkerOptions], Training]) -> None:
    """Answers until stdin ends. Whatever goes wrong ends the process: stderr tells the rest."""
    answers = _own_stream()
    training = prepare(WorkerOptions(**json.loads(sys.argv[1])))
    _answer(answers, {"versions": versions_here(), "device_kind": training.device_kind})
    for line in sys.stdin:
        num_epochs = json.loads(line)["epochs"]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loss = training.run_epochs(num_epochs)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        num_steps = num_epochs * training.steps_per_epoch
        told = {"seconds": seconds, "cpu_s": cpu_s, "steps": num_steps, "loss": float(loss)}
        _answer(answers, told)
    training.end()


def serve_questions(prepare: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answers each line of stdin by what a function makes of it, until stdin ends."""
    answers = _own_stream()
    answer = prepare()
    _answer(answers, {"versions": versions_here()})
    for line in sys.stdin:
        _answer(answers, answer(json.loads(line)))


def _own_stream() -> Any:
    """Libraries print to stdout whenever they like: it becomes stderr, answers have their own."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _answer(answers: Any, message: dict[str, Any]) -> None:
    answers.write(ANSWER_PREFIX + json.dumps(message) + "\n")
    answers.flush()


def versions_here() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are installed."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
