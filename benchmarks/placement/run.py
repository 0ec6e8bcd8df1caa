"""Runs the benchmark: two CPU replicas and a third device; a GPU and its host if there is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side
from benchmarks.machine import describe_machine
from benchmarks.placement.cases import CASES, Case, case_on_gpu, table_bytes_for
from benchmarks.placement.measuring import measure
from benchmarks.placement.report import MEANING, Figures, as_json, draw, make_table
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["choose_gpu_case", "run_placement"]

_GPU_NAME = "one GPU, a table of 20 GB"


def run_placement(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints a table for each case and writes figures and picture.

    Args:
        environments: where the workers run.
        effort: how often, how long, and how long to wait; a brief one takes one case of the CPU.
        console: of the tables.
        output: folder of the results.
        only: cases whose name contains this.
        is_smallest: small tables, and no GPU.

    Returns:
        Whether all went well.
    """
    load_before = os.getloadavg()[0]
    cases, accelerator = _choose_cases(environments, effort, console, only, is_smallest=is_smallest)
    results: dict[str, list[Figures]] = {}
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    failures: list[dict[str, str]] = []
    for case in cases:
        with console.status(f"placement: {case.name}") as status:
            try:
                figures, versions = measure(case, environments, effort, status.update)
            except WorkerError as error:
                failures.append({"case": case.name, "error": str(error)})
                console.print(f"Failed: {case.name}\n{error}", style="red", markup=False)
                continue
        results[case.name] = figures
        rows += as_json(case, figures)
        console.print(make_table(case, figures))
        console.print(
            f"Weights after an epoch differ from those of {figures[0].name} by at most "
            f"{max(one.difference for one in figures):.1g}."
        )
    machine = {**describe_machine(accelerator), "load_before": load_before}
    told = {"versions": {"ours": versions}, "machine": machine, "rounds": effort.num_rounds}
    write_json(
        output / "placement.json",
        {"benchmark": "placement", **told, "rows": rows, "failures": failures},
    )
    if results:
        console.print(MEANING, markup=False)
        measured_on = f"{machine['cpu']}, {machine['cores']} cores"
        measured_on += f", {accelerator}" if accelerator else ""
        draw(output / "placement.png", results, measured_on)
    console.print(f"Results and picture: {output / 'placement'}.json, .png", soft_wrap=True)
    return not failures


def _choose_cases(
    environments: Environments, effort: Effort, console: Console, only: str, *, is_smallest: bool
) -> tuple[list[Case], str | None]:
    """Returns what is to be measured here, and on which GPU; says what is not."""
    cases = [case for case in CASES if only in case.name][: 1 if effort.is_brief else None]
    if is_smallest:
        return [case.smallest() for case in cases], None
    if only not in _GPU_NAME:
        return cases, None
    memory = _ask_memory(environments, effort)
    chosen = choose_gpu_case(memory)
    if isinstance(chosen, Case):
        return [*cases, chosen], memory["device_kind"]
    console.print(f"Skipped: {_GPU_NAME}: {chosen}.")
    return cases, memory["device_kind"] or None


def choose_gpu_case(memory: dict[str, Any]) -> Case | str:
    """Returns what a machine can show of a table on the host, or why it cannot.

    Args:
        memory: what the worker `memory` told of it.
    """
    if not memory["device_kind"]:
        return "no GPU here"
    table_bytes = table_bytes_for(memory["gpu_bytes"], memory["host_bytes"])
    if table_bytes is None:
        sizes = (f"{memory[name] / 1e9:.1f} GB" for name in ("gpu_bytes", "host_bytes"))
        return "GPU and host have {}, three tables of 1 GB are needed".format(" and ".join(sizes))
    return case_on_gpu(table_bytes, memory["gpu_bytes"])


def _ask_memory(environments: Environments, effort: Effort) -> dict[str, Any]:
    """A process of its own asks, so that this one keeps its hands off the GPU."""
    side = Side(
        name="memory", module="benchmarks.workers.memory", options=WorkerOptions(workload="")
    )
    variables = {
        **environments.variables(side),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    with WorkerProcess(side.name, environments.command(side), variables) as worker:
        return worker.read_answer(effort.start_limit_s)
