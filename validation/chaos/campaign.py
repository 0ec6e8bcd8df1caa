"""Campaigns: trials drawn from one seed, run side by side, with results that can be resumed."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import rich.progress

from stratagem.launch.tasks.tied_process import tied_command
from validation.chaos.jobs import GOOD
from validation.chaos.sandbox import PATIENCE, entering

__all__ = ["ROOT", "Campaign", "run_trial"]

ROOT = Path(__file__).parents[2]
# Three rounds of faults, the end, and the next launch, each up to its own limit.
_TRIAL_LIMIT_S = 600.0 * PATIENCE
_TREE = Path("/media/tree")

Result = dict[str, Any]


class Campaign:
    """Trials of one seed and their results, a JSON line each in `folder/results.jsonl`."""

    def __init__(self, seed: int, folder: Path, job: str | None, fault: str | None) -> None:
        self.folder = folder
        self._seed = seed
        self._job = job
        self._fault = fault
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.jsonl"

    def results(self) -> list[Result]:
        """Results so far."""
        if not self._file.exists():
            return []
        lines = self._file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def seeds(self, number: int) -> Iterator[int]:
        """Seeds of trials that have no result, until the faults of all trials are `number`.

        A trial with several faults counts as several, so how many trials run is not known before.
        """
        chance = Random(self._seed)
        done = {result["seed"] for result in self.results()}
        while self.num_faults() < number:
            seed = chance.randrange(2**31)
            if seed not in done:
                yield seed

    def num_faults(self) -> int:
        """Number of faults that were made."""
        return sum(len(result["faults"]) for result in self.results())

    def run(self, number: int, num_parallel: int) -> None:
        """Runs trials until `number` faults were made."""
        seeds = self.seeds(number)
        columns = ("[progress.description]{task.description}", rich.progress.BarColumn())
        rest = (rich.progress.MofNCompleteColumn(), rich.progress.TimeRemainingColumn())
        with (
            rich.progress.Progress(*columns, *rest) as progress,
            concurrent.futures.ThreadPoolExecutor(num_parallel) as pool,
        ):
            bar = progress.add_task("faults", total=number, completed=self.num_faults())
            running: set[concurrent.futures.Future[Result]] = set()
            while True:
                while len(running) < num_parallel and (seed := next(seeds, None)) is not None:
                    running.add(pool.submit(run_trial, seed, self.folder, self._job, self._fault))
                if not running:
                    return
                done, running = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    result = future.result()
                    self._append(result)
                    progress.update(bar, completed=self.num_faults())
                    if result["outcome"] not in GOOD:
                        progress.console.print(_line(result))

    def _append(self, result: Result) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(result) + "\n")


def run_trial(seed: int, folder: Path, job: str | None, fault: str | None) -> Result:
    """Runs a trial in namespaces of its own."""
    file = folder / f"trial-{seed}.json"
    inside = _TREE / file.relative_to(ROOT)
    arguments = (str(seed), job or "", fault or "", str(inside))
    command = tied_command(entering(ROOT, "validation.chaos.trial", *arguments))
    failed = ""
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_TRIAL_LIMIT_S
        )
        failed = ended.stderr
    except subprocess.TimeoutExpired:
        failed = f"the trial took longer than {_TRIAL_LIMIT_S:g} s"
    if not file.exists():
        result: Result = {"seed": seed, "job": job, "faults": [], "outcome": "broken"}
        return result | {"why": failed, "skipped": [], "took_s": 0.0, "output": "", "stacks": ""}
    result = json.loads(file.read_text())
    file.unlink()
    return result


def _line(result: Result) -> str:
    faults = ", ".join(f"{fault['kind']} ({fault['where']})" for fault in result["faults"])
    why = result["why"].splitlines()[-1][:200] if result["why"] else ""
    return f"{result['outcome']}: --replay {result['seed']}: {result['job']}: {faults}: {why}"
