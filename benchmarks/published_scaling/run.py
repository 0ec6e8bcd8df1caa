"""Runs the benchmark: each program is compiled in a process of its own, then all rows predicted."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side
from benchmarks.machine import describe_machine
from benchmarks.published_scaling.figures import read_groups
from benchmarks.published_scaling.report import draw_scaling, make_table, summary
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["run_published_scaling"]

# The environment with XLA's compiler for GPUs.
_WITH_COMPILER = Path(__file__).parents[2] / ".venv-external" / "bin" / "python"
_SMALLEST = "resnet50"


def run_published_scaling(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Compiles, predicts, prints a table and writes figures and plot.

    Args:
        environments: whose own interpreter compiles, if there is none with the compiler for GPUs.
        effort: how long a compilation may take.
        console: of the table.
        output: folder of the results.
        only: models whose name contains this.
        is_smallest: the first measurements of ResNet-50 alone.

    Returns:
        Whether all programs were compiled.
    """
    # Importing Stratagem sets variables that workers of the other benchmarks would inherit.
    from benchmarks.published_scaling.prediction import Program, needed_batches, scaled_rows

    groups = [group for group in read_groups() if only in group.model]
    if is_smallest:
        groups = [group for group in groups if group.program == _SMALLEST][:1]
    if _WITH_COMPILER.is_file():
        environments = dataclasses.replace(environments, ours=_WITH_COMPILER)
    answers, failures = _compile_all(needed_batches(groups), environments, effort, console)
    programs = {key: [Program.of(one) for one in found] for key, found in answers.items()}
    rows = scaled_rows(groups, programs)
    compilers = ", ".join(sorted({one.compiler for found in programs.values() for one in found}))
    write_json(
        output / "published_scaling.json",
        {
            "benchmark": "published_scaling",
            "machine": describe_machine(None),
            "rows": [dataclasses.asdict(row) | {"error": row.error} for row in rows],
            "failures": failures,
        },
    )
    if rows:
        console.print(make_table(rows, compilers))
        console.print(summary(rows))
        draw_scaling(output / "published_scaling.png", rows)
    console.print(f"Results and plot: {output / 'published_scaling'}.json, .png", soft_wrap=True)
    return not failures


def _compile_all(
    batches: Mapping[tuple[str, str], Sequence[int]],
    environments: Environments,
    effort: Effort,
    console: Console,
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], list[dict[str, str]]]:
    """Compiles two programs at a time; leaves out those of which a batch failed."""
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures: list[dict[str, str]] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool, console.status("compiling"):
        running = {
            key: [pool.submit(_compile, *key, batch, environments, effort) for batch in sizes]
            for key, sizes in batches.items()
        }
        for key, own in running.items():
            try:
                answers[key] = [one.result() for one in own]
            except WorkerError as error:
                failures.append({"case": " on ".join(key), "error": str(error)})
                console.print(f"Failed: {' on '.join(key)}\n{error}", style="red", markup=False)
    return answers, failures


def _compile(
    program: str, accelerator: str, batch: int, environments: Environments, effort: Effort
) -> dict[str, Any]:
    options = WorkerOptions(workload=f"{program} {accelerator}", batch_size=batch)
    variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    side = Side(
        name=f"{program}, {batch} on {accelerator}",
        module="benchmarks.workers.planned_program",
        options=options,
        variables=variables,
    )
    command, shell = environments.command(side), environments.variables(side)
    with WorkerProcess(side.name, command, shell) as worker:
        return worker.read_answer(effort.answer_limit_s)
