"""Runs the benchmark: each work with each number of workers, all sides in turns."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side
from benchmarks.input_service.cases import SIDES, Starved, by_name, can_run
from benchmarks.input_service.pictures import draw_busy
from benchmarks.input_service.report import make_rows, make_table
from benchmarks.machine import busy_cores, describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_input_service"]

_ROUND_S, _SMALLEST_S = 6.0, 1.0
_CHECK_OF_LOAD_S = 1.0

Figures = dict[tuple[Starved, int, str], list[dict[str, float]]]


def run_input_service(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints a table and writes figures and plot.

    Args:
        environments: where the sides run.
        effort: how often to measure.
        console: of the table.
        output: folder of the results.
        only: work whose title contains this.
        is_smallest: one worker at most, and short rounds.

    Returns:
        Whether all went well.
    """
    sides: list[Side] = []
    for side in SIDES:
        if reason := environments.why_not(side):
            console.print(f"Skipped: {side.name}: {reason}.")
        else:
            sides.append(side)
    if is_smallest:
        ours = environments.anywhere(SIDES[0])
        sides = [ours, *environments.references(ours, SIDES[1:])]
    run = _Run(environments, effort, sides, _SMALLEST_S if is_smallest else _ROUND_S)
    works = by_name(only, is_smallest=is_smallest)
    with console.status("input_service") as status:
        run.write(output)
        for number in range(effort.num_rounds):
            for work in works:
                run.measure(work, number, status.update)
                run.write(output)  # a run takes long, and may be ended
    rows = make_rows(run.figures)
    for failure in run.failures:
        console.print(f"Failed: {failure['case']}\n{failure['error']}", style="red", markup=False)
    if rows:
        console.print(make_table(rows))
        machine = run.told()["machine"]
        measured_on = f"{machine['cpu']}, {machine['cores']} cores; steps are simulated"
        draw_busy(output / "input_service.png", rows, measured_on)
    console.print(f"Results and plot: {output / 'input_service'}.json, .png", soft_wrap=True)
    return not run.failures


class _Run:
    """What is measured, and what was found so far."""

    def __init__(
        self, environments: Environments, effort: Effort, sides: list[Side], seconds: float
    ) -> None:
        self._environments = environments
        self._effort = effort
        self._sides = sides
        self._seconds = seconds
        self.figures: Figures = collections.defaultdict(list)
        self.failures: list[dict[str, str]] = []
        self._versions: dict[str, dict[str, str]] = {}
        self._cores_of_others: list[float] = []

    def told(self) -> dict[str, Any]:
        """Returns what the results say beside the rows."""
        return {
            "benchmark": "input_service",
            "versions": self._versions,
            "machine": describe_machine(None),
            "cores_used_by_others": self._cores_of_others,
            "failures": self.failures,
        }

    def write(self, output: Path) -> None:
        """Writes what there is so far."""
        write_json(output / "input_service.json", self.told() | {"rows": make_rows(self.figures)})

    def measure(self, work: Starved, number: int, progress: Callable[[str], None]) -> None:
        """Measures a round: with each number of workers, the sides one after the other."""
        for num_workers in work.num_workers:
            self._cores_of_others.append(round(busy_cores(_CHECK_OF_LOAD_S), 2))
            for place in order_of_round(len(self._sides), number):
                side = self._sides[place]
                if not can_run(side, num_workers):
                    continue
                case = f"{work.title}, {side.name}, {num_workers} workers"
                progress(f"round {number + 1}: {case}")
                try:
                    told = self._ask(side, work.arguments(num_workers))
                except WorkerError as error:
                    self.failures.append({"case": case, "error": str(error)})
                    continue
                self._versions.setdefault(side.environment, {}).update(told.pop("versions"))
                self.figures[work, num_workers, side.name].append(told)

    def _ask(self, side: Side, arguments: dict[str, Any]) -> dict[str, Any]:
        program, flag, module, _ = self._environments.command(side)
        command = [program, flag, module, json.dumps(arguments)]
        variables = self._environments.variables(side)
        with WorkerProcess(side.name, command, variables) as worker:
            greeting = worker.read_answer(self._effort.start_limit_s)
            asked = {"seconds": self._seconds}
            told = worker.ask(asked, self._effort.answer_limit_s)
            return {**told, "versions": greeting["versions"]}
