"""Runs the benchmark: each workload is planned for one GPU and eight, and trained on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Place, jax_side
from benchmarks.machine import describe_machine
from benchmarks.plan.report import Comparison, make_table
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workloads import WORKLOADS

__all__ = ["ONE_DEVICE", "TARGET", "run_plan"]

ONE_DEVICE, TARGET = "1xH100", "8xH100"
# Examples of one device: on a GPU what one trains with, on a CPU what it has memory for. The CNN is
# not among them: its max pooling is another on CPUs (keras/numerics/layers.py).
_ON_GPU = {"mlp": 128, "resnet50": 256, "large_transformer": 32, "billion_transformer": 8}
_ON_CPU = {"mlp": 128, "transformer": 64, "large_transformer": 2, "resnet50": 8}
_SMALLEST, _BRIEF = ("mlp",), ("mlp", "transformer", "large_transformer")


def run_plan(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Plans and measures, prints a table and writes figures.

    Args:
        environments: whose own interpreter does both.
        effort: how long to wait; a brief one leaves the dearest out.
        console: of the table.
        output: folder of the results.
        only: workloads whose title contains this.
        is_smallest: the smallest alone.

    Returns:
        Whether all went well, and every plan is within a tenth of what was measured.
    """
    place, device = _place(environments, effort)
    batch_sizes = _ON_GPU if place.platform == "gpu" else _ON_CPU
    wanted = _SMALLEST if is_smallest else _BRIEF if effort.is_brief else tuple(batch_sizes)
    rows: list[Comparison] = []
    failures: list[dict[str, str]] = []
    for workload, batch_size in batch_sizes.items():
        title = WORKLOADS[workload].title
        if only not in title or workload not in wanted:
            continue
        with console.status(title):
            try:
                rows.append(_compare(workload, batch_size, place, environments, effort))
            except WorkerError as error:
                failures.append({"case": title, "error": str(error)})
                console.print(f"Failed: {title}\n{error}", style="red", markup=False)
    write_json(
        output / "plan.json",
        {
            "benchmark": "plan",
            "target": TARGET,
            "machine": describe_machine(device if place.platform == "gpu" else None),
            "rows": [
                {**dataclasses.asdict(row), "state_ratio": row.state_ratio, "ratio": row.ratio}
                | {"ratio_of_many": row.ratio_of_many}
                for row in rows
            ],
            "failures": failures,
        },
    )
    if rows:
        console.print(make_table(TARGET, device, rows))
    console.print(f"Results: {output / 'plan'}.json", soft_wrap=True)
    return not failures and all(row.agrees for row in rows)


def _place(environments: Environments, effort: Effort) -> tuple[Place, str]:
    """Where is measured: on the GPU, if there is one."""
    side = jax_side("probe", "probe", "mlp", Place("gpu", 1))
    with WorkerProcess("probe", environments.command(side), environments.variables(side)) as worker:
        kind = worker.read_answer(effort.start_limit_s)["device_kind"]
    return (Place("gpu", 1), kind) if kind else (Place("cpu", 1), "a CPU")


def _compare(
    workload: str, batch_size: int, place: Place, environments: Environments, effort: Effort
) -> Comparison:
    planned = _answer("planned_step", workload, batch_size, Place("cpu", 1), environments, effort)
    measured = _answer("measured_step", workload, batch_size, place, environments, effort)
    return Comparison(
        workload=WORKLOADS[workload].title, batch_size=batch_size, **planned, **measured
    )


def _answer(
    module: str,
    workload: str,
    batch_size: int,
    place: Place,
    environments: Environments,
    effort: Effort,
) -> dict[str, Any]:
    side = jax_side(module, module, workload, place, batch_size=batch_size)
    command, variables = environments.command(side), environments.variables(side)
    with WorkerProcess(side.name, command, variables) as worker:
        answer = worker.read_answer(effort.answer_limit_s)
    known = {field.name for field in dataclasses.fields(Comparison)}
    return {name: value for name, value in answer.items() if name in known}
