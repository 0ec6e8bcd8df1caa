"""Runs the benchmark: each size in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.growth.axes import AXES, Axis
from benchmarks.growth.report import Growth, draw_growth, make_table
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_growth"]

_LEAST_S = 1e-9  # of a clock, so that there is a logarithm
_OWN_VARIABLES = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


def run_growth(
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
        environments: where the sizes are measured.
        effort: how long to wait; a brief one leaves out the largest size of each axis.
        console: of the table.
        output: folder of the results.
        only: axes whose name contains this; a whole name adds the sizes that take minutes.
        is_smallest: small sizes, whose growth says nothing.

    Returns:
        Whether all went well.
    """
    results: list[Growth] = []
    failures: list[dict[str, str]] = []
    versions: dict[str, str] = {}
    for axis in AXES:
        if only not in axis.name:
            continue
        sizes = (*axis.sizes, *(axis.long_sizes if only == axis.name else ()))
        answers: dict[int, Mapping[str, Any]] = {}
        sizes = axis.sizes[:-1] if effort.is_brief else sizes
        for size in axis.smallest_sizes if is_smallest else sizes:
            with console.status(f"{size:,} {axis.name}"):
                try:
                    versions, answers[size] = _measure(
                        axis, size, environments, effort, is_smallest=is_smallest
                    )
                except WorkerError as error:
                    failures.append({"case": f"{size} {axis.name}", "error": str(error)})
                    console.print(f"Failed: {size} {axis.name}\n{error}", style="red", markup=False)
        if len(answers) > 1:
            results += [_growth(axis, key, answers) for key in axis.costs]
    machine = describe_machine(None)
    rows = [dataclasses.asdict(one) | {"exponents": one.exponents} for one in results]
    told = {"benchmark": "growth", "versions": versions, "machine": machine}
    write_json(output / "growth.json", {**told, "rows": rows, "failures": failures})
    if results:
        console.print(make_table(results))
        draw_growth(output / "growth.png", results, f"{machine['cpu']}, {machine['cores']} cores")
    console.print(f"Results and plot: {output / 'growth'}.json, .png", soft_wrap=True)
    is_steep = not is_smallest and any(one.is_steep for one in results)
    return not failures and not is_steep


def _growth(axis: Axis, key: str, answers: Mapping[int, Mapping[str, Any]]) -> Growth:
    def seconds(side: str) -> Sequence[float]:
        return [max(_LEAST_S, one[side][key]) for one in answers.values() if side in one]

    cost = axis.costs[key]
    return Growth(
        axis=axis.name,
        cost=cost.title,
        clock=cost.clock,
        sizes=list(answers),
        ours_s=seconds("ours"),
        by_hand_s=seconds("by hand"),
    )


def _measure(
    axis: Axis, size: int, environments: Environments, effort: Effort, *, is_smallest: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    command = [str(environments.ours), "-m", f"benchmarks.growth.costs.{axis.module}"]
    variables = environments.shell_variables() | _OWN_VARIABLES
    with WorkerProcess(f"{size} {axis.name}", command, variables) as worker:
        versions = worker.read_answer(effort.start_limit_s)["versions"]
        question = axis.question(size, is_smallest=is_smallest)
        return versions, worker.ask(question, effort.answer_limit_s)
