"""Runs the benchmark: calls that carry 1 KB to 100 MB of float32 there or back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side, whole_side
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort, order_of_round
from benchmarks.transport.report import Figures, draw_times, make_table
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["DIRECTIONS", "SIDES", "SIZES_BYTES", "calls_of_round", "run_transport"]

SIZES_BYTES = tuple(10**power for power in (3, 4, 5, 6, 7, 8))
_SMALLEST_SIZES_BYTES = SIZES_BYTES[:1]
DIRECTIONS = ("pull", "push")
_ROUND_BYTES = 10**8
_MIN_CALLS, _MAX_CALLS = 2, 100

# The second one is here to see what encryption costs: nothing in the library is sent so.
SIDES = (
    (whole_side("Stratagem", "stratagem_transport"), {"is_encrypted": True}),
    (whole_side("not encrypted", "stratagem_transport"), {"is_encrypted": False}),
    (whole_side("Ray actor", "ray_transport"), {}),
)


def run_transport(
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
        effort: how often to measure, and how long to wait.
        console: of the table.
        output: folder of the results.
        only: sides whose name contains this.
        is_smallest: the smallest size only.

    Returns:
        Whether all went well.
    """
    sides = [(side, options) for side, options in SIDES if only in side.name]
    if not sides:
        console.print(f"No side of transport is called {only!r}.", markup=False)
        return True
    sizes = _SMALLEST_SIZES_BYTES if is_smallest else SIZES_BYTES
    results: list[Figures] = []
    versions: dict[str, dict[str, str]] = {}
    failures: list[dict[str, str]] = []
    with console.status("transport: starting") as status:
        try:
            results, versions = _measure(sides, sizes, environments, effort, status.update)
        except WorkerError as error:
            failures.append({"case": "transport", "error": str(error)})
            console.print(f"Failed: {error}", style="red", markup=False)
    machine = describe_machine(None)
    rows = [dataclasses.asdict(one) for one in results]
    told = {"versions": versions, "machine": machine, "rounds": effort.num_rounds}
    write_json(
        output / "transport.json",
        {"benchmark": "transport", **told, "rows": rows, "failures": failures},
    )
    if results:
        console.print(make_table(results))
        measured_on = f"{machine['cpu']}, {machine['cores']} cores, loopback"
        draw_times(output / "transport.png", results, measured_on)
    console.print(f"Results and plot: {output / 'transport'}.json, .png", soft_wrap=True)
    return not failures


def calls_of_round(size_bytes: int) -> int:
    """Returns how many calls a side makes in a round."""
    return min(max(_ROUND_BYTES // size_bytes, _MIN_CALLS), _MAX_CALLS)


def _measure(
    sides: Sequence[tuple[Side, dict[str, Any]]],
    sizes: Sequence[int],
    environments: Environments,
    effort: Effort,
    progress: Callable[[str], None],
) -> tuple[list[Figures], dict[str, dict[str, str]]]:
    with contextlib.ExitStack() as stack:
        workers: list[WorkerProcess] = []
        versions: dict[str, dict[str, str]] = {}
        for side, options in sides:
            program, flag, module, _ = environments.command(side)
            command = [program, flag, module, json.dumps(options)]
            worker = WorkerProcess(side.name, command, environments.variables(side))
            workers.append(stack.enter_context(worker))
            versions[side.name] = worker.read_answer(effort.start_limit_s)["versions"]
        figures: list[Figures] = []
        for direction in DIRECTIONS:
            for size in sizes:
                seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
                for number in range(1 + effort.num_rounds):
                    progress(f"{direction} of {size} bytes, round {number}")
                    calls = calls_of_round(size) if number else 1 + _MIN_CALLS
                    question = {"direction": direction, "bytes": size, "calls": calls}
                    for place in order_of_round(len(workers), number):
                        worker = workers[place]
                        told = worker.ask(question, effort.answer_limit_s)
                        if number:  # the first one fills caches and opens connections
                            seconds[worker.name] += told["seconds"]
                figures.append(Figures(direction, size, seconds))
    return figures, versions
