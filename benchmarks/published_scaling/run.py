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
from benchmarks.published_scaling.figures import Group, read_groups
from benchmarks.published_scaling.prediction import Program, needed_batches, predict_throughput
from benchmarks.published_scaling.report import ScaledRow, draw_scaling, make_table, summary
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.protocol import WorkerOptions
from stratagem.planning import Reduction

__all__ = ["run_published_scaling", "scaled_rows"]

# The environment with XLA's compiler for GPUs, which `make test-gpu` makes, too.
_WITH_COMPILER = Path(__file__).parents[2] / ".venv-gpu" / "bin" / "python"
_QUICK = ("resnet50",)


def run_published_scaling(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_quick: bool = False,
) -> bool:
    """Compiles, predicts, prints a table and writes figures and plot.

    Args:
        environments: whose own interpreter compiles, if there is none with the compiler for GPUs.
        effort: how long a compilation may take.
        console: of the table.
        output: folder of the results.
        only: models whose name contains this.
        is_quick: ResNet-50 alone.

    Returns:
        Whether all programs were compiled.
    """
    groups = [
        group
        for group in read_groups()
        if only in group.model and (not is_quick or group.program in _QUICK)
    ]
    if _WITH_COMPILER.is_file():
        environments = dataclasses.replace(environments, ours=_WITH_COMPILER)
    programs, failures = _compile_all(groups, environments, effort, console)
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


def scaled_rows(
    groups: Sequence[Group], programs: Mapping[tuple[str, str], Sequence[Program]]
) -> list[ScaledRow]:
    """Returns published and predicted rows of the groups whose programs were compiled."""
    rows: list[ScaledRow] = []
    for group in groups:
        compiled = programs.get((group.program, group.accelerator))
        if not compiled:
            continue
        smallest = group.smallest
        base = predict_throughput(group, smallest, compiled)
        for row in group.rows:
            predicted = predict_throughput(group, row, compiled)
            rows.append(
                ScaledRow(
                    group=group.title,
                    model=group.model,
                    hardware=group.hardware,
                    unit=group.unit,
                    is_complete=group.is_complete,
                    devices=row.devices,
                    batch=row.batch,
                    passes=row.passes,
                    published=row.throughput,
                    predicted=predicted,
                    published_scaling=row.throughput / smallest.throughput,
                    predicted_scaling=predicted / base,
                    device_ratio=row.devices / smallest.devices,
                )
            )
    return rows


def _compile_all(
    groups: Sequence[Group], environments: Environments, effort: Effort, console: Console
) -> tuple[dict[tuple[str, str], list[Program]], list[dict[str, str]]]:
    """Compiles two programs at a time; leaves out what failed."""
    wanted = [(key, batch) for key, batches in needed_batches(groups).items() for batch in batches]
    programs: dict[tuple[str, str], list[Program]] = {}
    failures: list[dict[str, str]] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool, console.status("compiling"):
        running = [
            (key, pool.submit(_compile, *key, batch, environments, effort)) for key, batch in wanted
        ]
        for key, one in running:
            try:
                programs.setdefault(key, []).append(one.result())
            except WorkerError as error:
                failures.append({"case": " on ".join(key), "error": str(error)})
                console.print(f"Failed: {key}\n{error}", style="red", markup=False)
    failed = {failure["case"] for failure in failures}
    return {key: found for key, found in programs.items() if " on ".join(key) not in failed}, failures


def _compile(
    program: str, accelerator: str, batch: int, environments: Environments, effort: Effort
) -> Program:
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
        answer = worker.read_answer(effort.answer_limit_s)
    return _program(batch, answer)


def _program(batch: int, answer: Mapping[str, Any]) -> Program:
    reductions = tuple(
        Reduction(
            name, num_bytes=one["num_bytes"], behind=(), kind=one["kind"], times=one["times"]
        )
        for name, one in answer["reductions"].items()
    )
    return Program(batch, answer["compute_s"], answer["launch_s"], reductions, answer["compiler"])
