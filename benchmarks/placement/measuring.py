"""Measures the sides of a case: speed, what devices hold, and what moves between them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import Environments
from benchmarks.placement.cases import Case, Placed
from benchmarks.placement.report import Figures
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["largest_difference", "measure"]

_TOLERANCE = 1e-5


def measure(
    case: Case,
    environments: Environments,
    effort: Effort,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Figures], dict[str, str]]:
    """Measures all sides.

    Args:
        case: what to measure.
        environments: where the workers run.
        effort: how often, and how long.
        progress: told what is going on.

    Returns:
        The figures in the order of the sides, and the versions.

    Raises:
        WorkerError: a worker ended, did not answer in time, or trained to other weights than the
            first.
    """
    figures: list[Figures] = []
    versions: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        weights = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[WorkerProcess] = []
        for place, placed in enumerate(case.sides):
            progress(f"{case.name}: {placed.name}")
            with contextlib.ExitStack() as own:
                worker, versions = _started(own, case, placed, environments, effort)
                told = _first_answers(worker, weights / f"{place}.npz", effort)
                difference = largest_difference(weights / "0.npz", weights / f"{place}.npz")
                if difference > _TOLERANCE:
                    raise WorkerError(
                        f"{placed.name} trains to other weights than {case.sides[0].name}: they "
                        f"differ by {difference:.2g}."
                    )
                figures.append(Figures.of(case, placed, told, difference))
                if case.together:
                    workers.append(worker)
                    stack.enter_context(own.pop_all())
                else:
                    speeds = _rounds([worker], effort, progress)
                    figures[-1] = dataclasses.replace(figures[-1], steps_per_s=speeds[0])
        if case.together:
            speeds = _rounds(workers, effort, progress)
            figures = [
                dataclasses.replace(one, steps_per_s=rounds)
                for one, rounds in zip(figures, speeds, strict=True)
            ]
    return figures, versions


def largest_difference(one: Path, other: Path) -> float:
    """Returns by how much the numbers in two files differ, of each the part beyond 1 relatively.

    Args:
        one: arrays that NumPy has saved.
        other: arrays of the same names.
    """
    with np.load(one) as wanted, np.load(other) as got:
        differences = [
            np.max(np.abs(got[name] - wanted[name]) / np.maximum(1.0, np.abs(wanted[name])))
            for name in wanted
        ]
    return float(max(differences))


def _started(
    stack: contextlib.ExitStack,
    case: Case,
    placed: Placed,
    environments: Environments,
    effort: Effort,
) -> tuple[WorkerProcess, dict[str, str]]:
    side = case.side(placed)
    program, flag, module, _ = environments.command(side)
    variables = environments.variables(side)
    options = placed.options
    if case.together:  # XLA:CPU, whose profiles tell of each operation
        dump = stack.enter_context(tempfile.TemporaryDirectory())
        options = dataclasses.replace(options, dump=dump)
        variables["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cached program dumps nothing
    command = [program, flag, module, json.dumps(dataclasses.asdict(options))]
    worker = stack.enter_context(WorkerProcess(side.name, command, variables))
    return worker, worker.read_answer(effort.start_limit_s)["versions"]


def _first_answers(worker: WorkerProcess, weights: Path, effort: Effort) -> Mapping[str, Any]:
    """Trains to weights that can be compared; returns what it moves and holds then."""
    limit_s = effort.answer_limit_s
    worker.ask({"kind": "train", "epochs": 1}, limit_s)
    worker.ask({"kind": "weights", "path": str(weights)}, limit_s)
    return {
        **worker.ask({"kind": "traffic"}, limit_s),
        **worker.ask({"kind": "held"}, limit_s),
    }


def _rounds(
    workers: Sequence[WorkerProcess], effort: Effort, progress: Callable[[str], None]
) -> list[tuple[float, ...]]:
    def speed(worker: WorkerProcess, num_epochs: int) -> float:
        told = worker.ask({"kind": "train", "epochs": num_epochs}, effort.answer_limit_s)
        return told["steps"] / told["seconds"]

    num_epochs: list[int] = []
    for worker in workers:
        told = worker.ask({"kind": "train", "epochs": 1}, effort.answer_limit_s)
        num_epochs.append(max(1, round(effort.round_s / told["seconds"])))
    speeds: list[list[float]] = [[] for _ in workers]
    for number in range(effort.num_rounds):
        for place in order_of_round(len(workers), number):
            progress(f"round {number + 1}, {workers[place].name}")
            speeds[place].append(speed(workers[place], num_epochs[place]))
    return [tuple(rounds) for rounds in speeds]
