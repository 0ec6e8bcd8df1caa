"""Runs the benchmark: each size in a process of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side, whole_side
from benchmarks.growth.axes import AXES, COSTS, Axis
from benchmarks.growth.report import Growth, draw_growth, make_table
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_growth"]

_SIDE = whole_side("steps", "growing_steps")
_GROUPS, _QUICK_GROUPS = 10, 2
_CALLS_OF_VARIABLES = 20_000  # a group of calls updates so many


def run_growth(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_quick: bool = False,
) -> bool:
    """Measures, prints a table and writes figures and plot.

    Args:
        environments: where the sides run.
        effort: how long to wait.
        console: of the table.
        output: folder of the results.
        only: axes whose name contains this.
        is_quick: small sizes.

    Returns:
        Whether all went well.
    """
    results: list[Growth] = []
    failures: list[dict[str, str]] = []
    versions: dict[str, str] = {}
    for axis in AXES:
        if only not in axis.name:
            continue
        sizes = axis.quick_sizes if is_quick else axis.sizes
        answers: list[Mapping[str, Any]] = []
        for size in sizes:
            with console.status(f"{size:,} {axis.name}"):
                try:
                    answers.append(_measure(axis, size, environments, effort, is_quick=is_quick))
                except WorkerError as error:
                    failures.append({"case": f"{size} {axis.name}", "error": str(error)})
                    console.print(f"Failed: {size} {axis.name}\n{error}", style="red", markup=False)
        if len(answers) == len(sizes):
            versions = answers[0]["versions"]
            results += [_growth(axis, cost, list(sizes), answers) for cost in COSTS]
    machine = describe_machine(None)
    rows = [dataclasses.asdict(one) | {"exponents": one.exponents} for one in results]
    told = {"benchmark": "growth", "versions": versions, "machine": machine}
    write_json(output / "growth.json", {**told, "rows": rows, "failures": failures})
    if results:
        console.print(make_table(results))
        draw_growth(output / "growth.png", results, f"{machine['cpu']}, {machine['cores']} cores")
    console.print(f"Results and plot: {output / 'growth'}.json, .png", soft_wrap=True)
    return not failures and not any(one.is_steep for one in results)


def _growth(axis: Axis, cost: str, sizes: list[int], answers: list[Mapping[str, Any]]) -> Growth:
    ours_s, by_hand_s = ([one[side][cost] for one in answers] for side in ("run", "by hand"))
    return Growth(axis.name, cost, sizes, ours_s, by_hand_s)


def _measure(
    axis: Axis, size: int, environments: Environments, effort: Effort, *, is_quick: bool
) -> dict[str, Any]:
    options = axis.question(size)
    num_calls = max(10, _CALLS_OF_VARIABLES // options["num_variables"] // 10)
    num_groups = _QUICK_GROUPS if is_quick else _GROUPS
    question = {"calls": 10 if is_quick else num_calls, "groups": num_groups}
    with _started(_SIDE, options, environments) as worker:
        found: dict[str, Any] = {"versions": worker.read_answer(effort.start_limit_s)["versions"]}
        sides = ("run", "by hand")
        for side in sides:
            found[side] = worker.ask({"side": side}, effort.answer_limit_s)
        for side in sides:
            found[side] |= worker.ask({"side": side, **question}, effort.answer_limit_s)
        return found


def _started(side: Side, options: Mapping[str, int], environments: Environments) -> WorkerProcess:
    program, flag, module, _ = environments.command(side)
    command = [program, flag, module, json.dumps(options)]
    return WorkerProcess(side.name, command, environments.variables(side))
