"""Runs the sides of a case in turns, so that a drift of the machine meets all of them alike."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import Case, Environments, Side
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["Effort", "Measurement", "measure", "order_of_round", "paired_ratios"]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure, and how long to wait.

    Args:
        num_rounds: in each, every side trains once.
        round_s: what a round of one side should take.
        start_limit_s: for a worker to start.
        answer_limit_s: for an answer; the first one includes compiling.
        is_brief: only what matters most, for all benchmarks in one go.
    """

    num_rounds: int = 4
    round_s: float = 0.5
    start_limit_s: float = 300.0
    answer_limit_s: float = 600.0
    is_brief: bool = False


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One side's speeds.

    Args:
        side: which.
        steps_per_s: of each round.
        versions: of what it ran on.
        device_kind: what its devices are.
    """

    side: Side
    steps_per_s: tuple[float, ...]
    versions: dict[str, str]
    device_kind: str

    @property
    def median_steps_per_s(self) -> float:
        return statistics.median(self.steps_per_s)


def measure(
    case: Case,
    environments: Environments,
    effort: Effort,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Measurement]:
    """Measures all sides of a case.

    Args:
        case: what to measure.
        environments: where the sides run.
        effort: how long.
        progress: told what is going on, each time something is done.

    Returns:
        The measurements, ours first.

    Raises:
        WorkerError: a worker ended, did not answer in time, or its loss is no number.
    """
    sides = [case.ours, *case.references]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(side.name, environments.command(side), environments.variables(side))
            )
            for side in sides
        ]
        greetings: list[dict[str, Any]] = []
        for worker in workers:  # one compiles while the next ones import
            progress(f"{case.name}: {worker.name} compiles")
            greetings.append(worker.read_answer(effort.start_limit_s))
            _train(worker, 1, effort)
        progress(f"{case.name}: warming up")
        num_epochs = _epochs_per_round(workers, effort)
        speeds = _rounds(workers, num_epochs, effort, lambda text: progress(f"{case.name}: {text}"))
    return [
        Measurement(side, tuple(rounds), greeting["versions"], greeting["device_kind"])
        for side, rounds, greeting in zip(sides, speeds, greetings, strict=True)
    ]


def order_of_round(num_workers: int, round_index: int) -> list[int]:
    """Who comes when: in each round somebody else is first."""
    return [(round_index + place) % num_workers for place in range(num_workers)]


def paired_ratios(ours: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns our speed over the reference's, round by round: above 1 we are faster."""
    return [mine / theirs for mine, theirs in zip(ours, reference, strict=True)]


def _epochs_per_round(workers: Sequence[WorkerProcess], effort: Effort) -> int:
    """The same for all sides, so that what an epoch and a call of `fit` cost weighs the same."""
    epoch_s = statistics.median(_train(worker, 1, effort)["seconds"] for worker in workers)
    return max(1, round(effort.round_s / epoch_s))


def _rounds(
    workers: Sequence[WorkerProcess],
    num_epochs: int,
    effort: Effort,
    progress: Callable[[str], None],
) -> list[list[float]]:
    speeds: list[list[float]] = [[] for _ in workers]
    for round_index in range(effort.num_rounds):
        for index in order_of_round(len(workers), round_index):
            progress(f"round {round_index + 1}, {workers[index].name}")
            answer = _train(workers[index], num_epochs, effort)
            speeds[index].append(answer["steps"] / answer["seconds"])
    return speeds


def _train(worker: WorkerProcess, num_epochs: int, effort: Effort) -> dict[str, Any]:
    answer = worker.ask({"epochs": num_epochs}, effort.answer_limit_s)
    if not math.isfinite(answer["loss"]):
        raise WorkerError(f"Worker {worker.name!r} trains to a loss of {answer['loss']}.")
    return answer
