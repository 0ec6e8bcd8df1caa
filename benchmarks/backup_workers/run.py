"""Runs the benchmark: the same training with and without a backup worker, in turns."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Environments, whole_side
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from benchmarks.workloads import WORKLOADS

__all__ = ["Training", "make_table", "run_backup_workers", "training_of"]

_REPOSITORY = Path(__file__).parents[2]
_SIDE = whole_side("Stratagem", "backup_workers_fit")
_NUM_WORKERS = 4
# A pause is some steps long here, as one of a garbage collector or of a neighbor on the host.
_SHARE, _PAUSE_S, _WORK_S = 0.1, 0.25, 0.05
_NUM_STEPS, _BRIEF_NUM_STEPS, _SMALLEST_NUM_STEPS = 300, 60, 10
_LIMIT_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What was measured of one run.

    Args:
        num_backup_workers: that a step need not wait for.
        steady_steps_per_s: steps per second in the part without pauses.
        steps_per_s: in the part with pauses.
        share_of_rows: part of the rows of the steps with pauses that took part.
        share_of_whole: part of these steps in which all workers took part.
    """

    num_backup_workers: int
    steady_steps_per_s: float
    steps_per_s: float
    share_of_rows: float
    share_of_whole: float

    @property
    def rows_per_s(self) -> float:
        """Rows that took part per second with pauses, in batches."""
        return self.steps_per_s * self.share_of_rows


def training_of(
    num_backup_workers: int, begun_s: Sequence[float], num_participants: Sequence[int]
) -> Training:
    """Returns the figures of a run.

    Args:
        num_backup_workers: that it had.
        begun_s: when its three parts began, and when the last one ended.
        num_participants: of each step of all parts.

    Raises:
        WorkerError: it has ended too soon.
    """
    if len(begun_s) != 4:
        raise WorkerError(f"The training ended in its part {len(begun_s)} of 3.")
    num_steps = len(num_participants) // 3
    paused = num_participants[2 * num_steps : 3 * num_steps]
    return Training(
        num_backup_workers=num_backup_workers,
        steady_steps_per_s=num_steps / (begun_s[2] - begun_s[1]),
        steps_per_s=num_steps / (begun_s[3] - begun_s[2]),
        share_of_rows=sum(paused) / len(paused) / _NUM_WORKERS,
        share_of_whole=sum(one == _NUM_WORKERS for one in paused) / len(paused),
    )


def make_table(trainings: Sequence[Training]) -> Table:
    """Returns a row for each number of backup workers, medians of its runs."""
    title = (
        f"{_NUM_WORKERS} workers, steps of {_WORK_S:g} s and more; "
        f"each worker begins {_SHARE:.0%} of them {_PAUSE_S:g} s later"
    )
    table = Table(title=title, title_justify="left")
    for header in (
        "backup workers",
        "steps/s",
        "ratio",
        "batches/s",
        "ratio",
        "steps of all workers",
        "steps/s without pauses",
    ):
        table.add_column(header, justify="right")
    numbers = sorted({one.num_backup_workers for one in trainings})

    def median(number: int, name: str) -> float:
        return statistics.median(
            getattr(one, name) for one in trainings if one.num_backup_workers == number
        )

    for number in numbers:
        steps, rows = median(number, "steps_per_s"), median(number, "rows_per_s")
        table.add_row(
            str(number),
            f"{steps:.1f}",
            f"{steps / median(numbers[0], 'steps_per_s'):.2f}",
            f"{rows:.1f}",
            f"{rows / median(numbers[0], 'rows_per_s'):.2f}",
            f"{median(number, 'share_of_whole'):.0%}",
            f"{median(number, 'steady_steps_per_s'):.1f}",
        )
    return table


def run_backup_workers(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints a table and writes the figures.

    Args:
        environments: where the training runs.
        effort: its number of rounds; in each, both trainings run once.
        console: of the table.
        output: folder of the results.
        only: a number of backup workers, "" for none and one.
        is_smallest: one round of short parts.

    Returns:
        Whether all went well.
    """
    num_steps = _BRIEF_NUM_STEPS if effort.is_brief else _NUM_STEPS
    num_steps = _SMALLEST_NUM_STEPS if is_smallest else num_steps
    numbers = [int(only)] if only else [0, 1]
    trainings: list[Training] = []
    for number_of_round in range(1 if is_smallest else effort.num_rounds):
        for number in numbers:
            try:
                with console.status(f"round {number_of_round + 1}, {number} backup workers"):
                    trainings.append(_train(environments, number, num_steps))
            except WorkerError as error:
                console.print(f"Failed: {error}", style="red", markup=False)
                return False
    console.print(make_table(trainings))
    results: dict[str, Any] = {"benchmark": "backup_workers", "workers": _NUM_WORKERS}
    results |= {"share": _SHARE, "pause_s": _PAUSE_S, "work_s": _WORK_S}
    results["machine"] = describe_machine(None)
    results["trainings"] = [dataclasses.asdict(one) for one in trainings]
    write_json(output / "backup_workers.json", results)
    return True


def _train(environments: Environments, num_backup_workers: int, num_steps: int) -> Training:
    workload = WORKLOADS["mlp"]
    batch_size = _NUM_WORKERS * workload.batch_size
    with tempfile.TemporaryDirectory() as folder:
        steps_per_epoch = min(workload.steps_per_epoch, 3 * num_steps)
        arrays = dataclasses.replace(
            workload, batch_size=batch_size, steps_per_epoch=steps_per_epoch
        ).arrays()
        for array, path in zip(arrays, ("x", "y"), strict=True):
            np.save(Path(folder) / f"{path}.npy", array)
        options = {
            "folder": folder,
            "batch_size": batch_size,
            "num_backup_workers": num_backup_workers,
            "num_steps": num_steps,
            "share": _SHARE,
            "pause_s": _PAUSE_S,
            "work_s": _WORK_S,
        }
        _launch(environments, options)
        told = json.loads((Path(folder) / "times.json").read_text(encoding="ascii"))
    return training_of(num_backup_workers, told["begun_s"], told["num_participants"])


def _launch(environments: Environments, options: Mapping[str, Any]) -> None:
    script = str(_REPOSITORY / f"{_SIDE.module.replace('.', '/')}.py")
    command = [str(environments.ours.with_name("stratagem")), "launch", "--survivors"]
    command += ["--workers", str(_NUM_WORKERS), script, json.dumps(options)]
    paths = f"{_REPOSITORY / 'src'}{os.pathsep}{_REPOSITORY}"
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=_REPOSITORY,
            env={**environments.variables(_SIDE), "PYTHONPATH": paths},
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"The training did not end within {_LIMIT_S:g} s.") from error
    if ended.returncode:
        raise WorkerError(ended.stderr.decode(errors="replace")[-3000:])
