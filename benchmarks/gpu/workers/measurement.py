"""The measurement of a side: the first step, a warm epoch, and rounds of whole epochs.

The figures are written to a file after each stage, so that a process that is ended keeps what it
has measured.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.models import GpuModel, model_of
from benchmarks.gpu.options import SideOptions
from benchmarks.workers.protocol import versions_here

__all__ = ["Figures", "Training", "measure", "take"]

_MAX_EPOCHS = 10_000
_gates: list[IO[str]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A prepared model.

    Args:
        first_call: runs a call on the first data, waits for the device and returns the loss, the
            mean over the call's steps.
        train: trains for so many epochs, waits, and returns the last loss.
        device_kind: name of the device.
        num_parameters: trainable numbers.
        peak_bytes: returns the largest memory in use on the device; None if unknown.
        compile_s: returns the seconds of compilation so far; None if unknown.
        profile: profiles some steps, and writes what it finds to a file and beside it.
        steps_s: returns the seconds that the steps of the last `train` took, where it prepares
            much before the first one; None to count all of the call.
    """

    first_call: Callable[[], float]
    train: Callable[[int], float]
    device_kind: str
    num_parameters: int
    peak_bytes: Callable[[], int | None]
    compile_s: Callable[[], float | None] = lambda: None
    profile: Callable[[Path], None] | None = None
    steps_s: Callable[[], float] | None = None


class Figures:
    """The figures of a side, in a file that is replaced whenever some are added."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._figures: dict[str, Any] = {"versions": versions_here(), "stage": "imported"}

    def add(self, **figures: Any) -> None:
        self._figures |= figures
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self._figures), encoding="utf-8")
        temporary.replace(self._path)


def measure(prepare: Callable[[SideOptions, GpuModel], Training]) -> None:
    """Measures the side that the command line describes.

    Args:
        prepare: makes the model and its data.
    """
    options = SideOptions.from_command_line()
    figures = Figures(options.result)
    figures.add(import_s=time.time() - options.begun_s)
    model = model_of(options.model, is_tiny=options.is_tiny)
    training = prepare(options, model)
    figures.add(
        stage="prepared",
        prepare_s=time.time() - options.begun_s,
        device_kind=training.device_kind,
        num_parameters=training.num_parameters,
        steps_per_call=options.steps_per_call,
        units_per_step=model.units_per_step,
        flops_per_step=model.flops_per_step(training.num_parameters),
    )
    waited_s = _pass_gate(options.gate)
    begun_s = time.perf_counter()
    loss = training.first_call()
    figures.add(
        stage="first step",
        first_call_s=time.perf_counter() - begun_s,
        first_step_s=time.time() - options.begun_s - waited_s,
        compile_s=training.compile_s(),
        first_loss=loss,
        peak_bytes=training.peak_bytes(),
    )
    second_s, loss = take(training.first_call)
    figures.add(stage="second call", second_call_s=second_s, second_loss=loss)
    if options.num_rounds:
        _rounds(training, model, options, figures)
    if options.profile and training.profile is not None:
        figures.add(stage="profile")
        training.profile(Path(options.profile))
    figures.add(stage="done", whole_s=time.time() - options.begun_s)
    _leave()


def _rounds(training: Training, model: GpuModel, options: SideOptions, figures: Figures) -> None:
    first_s, loss = take(lambda: training.train(1))  # may compile what only an epoch needs
    figures.add(stage="first epoch", first_epoch_s=first_s, epoch_loss=loss)
    epoch_s, _ = take(lambda: training.train(1))
    num_epochs = min(_MAX_EPOCHS, max(1, round(options.round_s / epoch_s)))
    speeds: list[float] = []
    for _ in range(options.num_rounds):
        seconds, loss = take(lambda: training.train(num_epochs))
        seconds = training.steps_s() if training.steps_s else seconds
        speeds.append(num_epochs * model.steps_per_epoch / seconds)
        figures.add(
            stage=f"round {len(speeds)}",
            steps_per_s=speeds,
            epochs_per_round=num_epochs,
            last_loss=loss,
            peak_bytes=training.peak_bytes(),
            compile_s=training.compile_s(),
        )


def _pass_gate(path: str) -> float:
    """Locks a file until this process ends; returns the seconds of waiting for others."""
    if not path:
        return 0.0
    begun_s = time.time()
    gate = open(path, "w")  # noqa: SIM115 - open until the process ends
    fcntl.flock(gate, fcntl.LOCK_EX)
    _gates.append(gate)
    return time.time() - begun_s


def take(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds that a call takes, and its result."""
    begun_s = time.perf_counter()
    result = function()
    return time.perf_counter() - begun_s, result


def _leave() -> None:
    """Ends the process: freeing gigabytes in order takes seconds of the next side's time."""
    os._exit(0)
