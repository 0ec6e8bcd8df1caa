"""Runs the benchmark: in each round a fresh process of each side takes a first step."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.first_step.cases import (
    HEAVY,
    LIGHT,
    REFERENCE,
    SMALLEST,
    FirstStepSide,
    first_step_sides,
)
from benchmarks.first_step.report import (
    SECONDS,
    FirstStep,
    Start,
    describe,
    draw_first_steps,
    make_start_table,
    make_table,
    peer_ratios,
)
from benchmarks.first_step.starts import time_imports, time_workers
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workloads import WORKLOADS

__all__ = ["run_first_step"]

# A round of a heavy workload takes minutes.
_MAX_ROUNDS = 2
# Short runs vary more.
_LIGHT_ROUNDS_PER_ROUND = 3
_STARTS = {"imports": time_imports, "two workers": time_workers}


def run_first_step(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints tables and writes figures and plot.

    Args:
        environments: where the sides run.
        effort: how often to measure, and how long to wait; a brief one takes no heavy workload.
        console: of the tables.
        output: folder of the results.
        only: workloads whose title contains this, "imports" or "two workers"; without it, one of
            the heavy workloads, in fewer rounds, and without compilers that take a minute.
        is_smallest: the MLP alone, once, by us and by Keras on one device.

    Returns:
        Whether all went well.
    """
    num_heavy = min(effort.num_rounds, _MAX_ROUNDS) if only else 1
    num_light = 1 if is_smallest else num_heavy * _LIGHT_ROUNDS_PER_ROUND if only else 2
    machine = describe_machine(None)
    results = _Results(environments, effort, console, has_slow=bool(only), is_smallest=is_smallest)

    def keep() -> None:
        """Writes what there is so far: the whole takes long."""
        told = {"machine": machine, "rounds": {"light": num_light, "heavy": num_heavy}}
        write_json(output / "first_step.json", {**told, **results.described()})

    heavy = () if is_smallest or effort.is_brief else HEAVY if only else HEAVY[:1]
    workloads = (*heavy, LIGHT)
    for workload in workloads:
        if only in WORKLOADS[workload].title:
            results.measure(workload, num_light if workload == LIGHT else num_heavy)
            keep()
    for name, measure in _STARTS.items():
        if only in name:
            results.time_starts(name, measure, num_light)
    keep()
    if results.rows:
        console.print(make_table(results.rows))
        measured_on = f"{machine['cpu']}, {machine['cores']} cores"
        draw_first_steps(output / "first_step.png", results.rows, measured_on)
    if results.starts:
        console.print(make_start_table(results.starts))
    console.print(f"Results and plot: {output / 'first_step'}.json, .png", soft_wrap=True)
    return not results.failures


class _Results:
    """Everything measured so far; failures are shown at once."""

    def __init__(
        self,
        environments: Environments,
        effort: Effort,
        console: Console,
        *,
        has_slow: bool,
        is_smallest: bool,
    ) -> None:
        self.rows: list[FirstStep] = []
        self.starts: list[Start] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.skipped: list[dict[str, str]] = []
        self.failures: list[dict[str, str]] = []
        self._environments, self._effort, self._console = environments, effort, console
        self._has_slow = has_slow
        self._is_smallest = self._is_warmed_up = is_smallest

    def described(self) -> dict[str, Any]:
        """Returns the content of the file."""
        return {
            "benchmark": "first_step",
            "versions": self.versions,
            "rows": describe(self.rows),
            "ratios": peer_ratios(self.rows),
            "starts": [one.described() for one in self.starts],
            "skipped": self.skipped,
            "failures": self.failures,
        }

    def measure(self, workload: str, num_rounds: int) -> None:
        """Measures all sides of a workload in turns; one that fails has no row."""
        title = WORKLOADS[workload].title
        self._warm_up()
        wanted = first_step_sides(workload, has_slow=self._has_slow)
        if self._is_smallest:
            wanted = [one for one in wanted if one.name in (REFERENCE, SMALLEST)]
        sides = [one for one in wanted if self._can_run(one)]
        found: dict[str, list[dict[str, float]]] = {one.name: [] for one in sides}
        with tempfile.TemporaryDirectory() as folder, self._console.status(title) as status:

            def start(place: int, number: int) -> None:
                one = sides[place]
                if one.name not in found:
                    return
                status.update(f"{title}: {one.name}, round {number}")
                # A cold run has a folder of its own, empty; warm ones share what the first fills.
                # Without spaces: the compiler that PyTorch calls would split the path.
                cache = Path(folder, f"{place}-{0 if one.is_warm else number}")
                times = self._start(title, one, cache)
                if times is None:
                    del found[one.name]
                elif number:
                    found[one.name].append(times)

            for place, one in enumerate(sides):
                if one.is_warm:
                    start(place, 0)
            for number in range(1, 1 + num_rounds):
                for place in order_of_round(len(sides), number - 1):
                    if number <= (sides[place].num_rounds or num_rounds):
                        start(place, number)
        self.rows += [
            FirstStep(
                workload=title,
                name=one.name,
                is_warm=one.is_warm,
                wanted=one.wanted,
                **{key: [times[key] for times in found[one.name]] for key in SECONDS},
            )
            for one in sides
            if one.name in found
        ]

    def _warm_up(self) -> None:
        """Starts each cold side once: the very first runs read files that later ones find read."""
        if self._is_warmed_up:
            return
        self._is_warmed_up = True
        with tempfile.TemporaryDirectory() as folder, self._console.status("warming up"):
            for place, one in enumerate(first_step_sides(LIGHT, has_slow=self._has_slow)):
                if not one.is_warm and self._can_run(one):
                    self._start("warming up", one, Path(folder, str(place)))

    def time_starts(
        self,
        name: str,
        measure: Callable[[int, Environments, Effort], list[Start]],
        num_rounds: int,
    ) -> None:
        with self._console.status(name):
            try:
                self.starts += measure(num_rounds, self._environments, self._effort)
            except WorkerError as error:
                self._fail(name, error)

    def _can_run(self, one: FirstStepSide) -> bool:
        reason = self._environments.why_not(one.side)
        told = {"name": one.name, "reason": reason or ""}
        if reason and told not in self.skipped:
            self.skipped.append(told)
            self._console.print(f"Skipped: {one.name}: {reason}.", markup=False)
        return reason is None

    def _start(self, title: str, one: FirstStepSide, cache: Path) -> dict[str, float] | None:
        side = dataclasses.replace(
            one.side, variables={**one.side.variables, **one.variables(cache)}
        )
        command, variables = self._environments.command(side), self._environments.variables(side)
        begin_s = time.monotonic()
        try:
            with WorkerProcess(one.name, command, variables) as worker:
                greeting = worker.read_answer(self._effort.start_limit_s)
                first = self._step(worker)
                from_start_s = time.monotonic() - begin_s
                second = self._step(worker)
        except WorkerError as error:
            self._fail(f"{title}, {one.name}", error)
            return None
        self.versions.setdefault(side.environment, {}).update(greeting["versions"])
        return {
            "first_step_s": first["seconds"],
            "first_step_cpu_s": first["cpu_s"],
            "from_start_s": from_start_s,
            "second_step_s": second["seconds"],
        }

    def _step(self, worker: WorkerProcess) -> dict[str, Any]:
        answer = worker.ask({"epochs": 1}, self._effort.answer_limit_s)
        if not math.isfinite(answer["loss"]):
            raise WorkerError(f"The loss of {worker.name!r} is {answer['loss']}.")
        return answer

    def _fail(self, name: str, error: WorkerError) -> None:
        self.failures.append({"case": name, "error": str(error)})
        self._console.print(f"Failed: {name}\n{error}", style="red", markup=False)
