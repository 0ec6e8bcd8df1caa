"""Runs the benchmark: a model and a method at a time."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.slow_links.curves import Training
from benchmarks.slow_links.links import LINKS, TwoHosts, two_hosts
from benchmarks.slow_links.methods import METHODS, TRIALS, Trial
from benchmarks.slow_links.report import draw_curves, make_table, show_claims
from benchmarks.slow_links.training import Trainer, train_alone
from benchmarks.worker_process import WorkerError

__all__ = ["run_slow_links"]


def run_slow_links(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Trains, prints a table for each trial and writes figures and plots. Needs root and iproute2.

    Args:
        environments: whose own interpreter trains.
        effort: not used; curves are not repeated.
        console: of the tables.
        output: folder of the results; those of earlier runs stay.
        only: what contains this of "trial, method".
        is_smallest: a few steps of two methods.

    Returns:
        Whether all went well.
    """
    del effort
    results = _Results(output)
    failures: list[dict[str, str]] = []
    shown: list[str] = []
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as caches:
        for name, whole in TRIALS.items():
            trial = whole.brief() if is_smallest else whole
            for method in trial.methods:
                case = f"{name}, {method.name}"
                if only not in case:
                    continue
                try:
                    with console.status(case):
                        weights = _weights(environments, hosts, name, trial, output)
                        trainer = Trainer(
                            environments, hosts, name, trial, method, Path(caches), weights
                        )
                        training = trainer.measure()
                    results.add(training)
                except WorkerError as error:
                    failures.append({"case": case, "error": str(error)})
                    console.print(f"Failed: {case}\n{error}", style="red", markup=False)
                shown.append(name)
    results.write(failures)
    for name in dict.fromkeys(shown):
        _show(results.of(name), console, output)
    show_claims(console, results.trainings)
    console.print(f"Results and plots: {output / 'slow_links'}*.json, .png", soft_wrap=True)
    return not failures


def _weights(
    environments: Environments, hosts: TwoHosts, name: str, trial: Trial, output: Path
) -> Path | None:
    """Returns the file with the weights that a trial begins from, which its first run makes."""
    if not trial.first_steps:
        return None
    file = output.resolve() / f"slow_links_{_file_name(name)}_{trial.first_steps}.npz"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished.npz")
        train_alone(environments, hosts, name, trial, unfinished)
        unfinished.rename(file)
    return file


def _file_name(trial: str) -> str:
    return trial.replace(" ", "_")


class _Results:
    """What was measured, also by earlier runs into the same folder."""

    def __init__(self, output: Path) -> None:
        self._file = output / "slow_links.json"
        known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.trainings = [Training.of(one) for one in known.get("trainings", [])]

    def of(self, task: str) -> list[Training]:
        """Returns the trainings of a trial in the order of the methods."""
        by_method = {one.method: one for one in self.trainings if one.task == task}
        return [by_method[one.name] for one in METHODS if one.name in by_method]

    def add(self, training: Training) -> None:
        """Adds a training, in place of an earlier one of the same trial and method."""
        key = (training.task, training.method)
        kept = [one for one in self.trainings if (one.task, one.method) != key]
        self.trainings = [*kept, training]
        self.write([])

    def write(self, failures: Sequence[dict[str, str]]) -> None:
        """Writes all, after each training, so that an interrupted run leaves the others."""
        told = {
            "benchmark": "slow_links",
            "machine": describe_machine(None),
            "links": [dataclasses.asdict(one) for one in LINKS],
            "trainings": [dataclasses.asdict(one) for one in self.trainings],
            "failures": list(failures),
        }
        write_json(self._file, told)


def _show(trainings: Sequence[Training], console: Console, output: Path) -> None:
    if not trainings or trainings[0].method != METHODS[0].name:
        return
    console.print(make_table(trainings))
    name = _file_name(trainings[0].task)
    told = f"two workers, each on a core of {describe_machine(None)['cpu']}"
    draw_curves(output / f"slow_links_{name}.png", trainings, told)
