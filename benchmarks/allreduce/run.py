"""Runs the benchmark: clusters of 2 and 4 processes, sizes from 4 KiB to 256 MiB."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.allreduce.measuring import PEER, Cluster, Figures, measure
from benchmarks.allreduce.report import draw_bandwidths, make_table, peer_ratios
from benchmarks.cases import Environments
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError

__all__ = ["CLUSTERS", "SIZES_BYTES", "run_allreduce"]

CLUSTERS = (Cluster(2), Cluster(4), Cluster(2, devices_per_process=2))
SIZES_BYTES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28))
_BRIEF_SIZES_BYTES = tuple(2**power for power in (12, 18, 24, 26))
_SMALLEST_SIZES_BYTES = SIZES_BYTES[:1]


def run_allreduce(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints a table for each cluster and writes figures and plot.

    Args:
        environments: where ours and PyTorch run.
        effort: how often to measure; a brief one takes four sizes and leaves the last cluster out.
        console: of the tables.
        output: folder of the results.
        only: clusters whose name contains this.
        is_smallest: two processes and the smallest size.

    Returns:
        Whether all went well.
    """
    results: dict[Cluster, list[Figures]] = {}
    versions: dict[str, dict[str, str]] = {}
    failures: list[dict[str, str]] = []
    sizes = _BRIEF_SIZES_BYTES if effort.is_brief else SIZES_BYTES
    sizes = _SMALLEST_SIZES_BYTES if is_smallest else sizes
    for cluster in CLUSTERS[: 1 if is_smallest else 2 if effort.is_brief else None]:
        if only not in str(cluster):
            continue
        with console.status(str(cluster)) as status:
            try:
                figures, told = measure(cluster, sizes, environments, effort, status.update)
            except WorkerError as error:
                failures.append({"case": str(cluster), "error": str(error)})
                console.print(f"Failed: {cluster}\n{error}", style="red", markup=False)
                continue
        results[cluster] = figures
        versions |= told
        console.print(make_table(cluster, figures))
    if results and "peers" not in versions:
        console.print(f"Skipped: {PEER}: `make .venv-peers/.complete` makes its environment.")
    machine = describe_machine(None)
    write_json(output / "allreduce.json", _as_json(results, versions, machine, failures))
    if results:
        measured_on = f"{machine['cpu']}, {machine['cores']} cores, loopback"
        draw_bandwidths(output / "allreduce.png", results, measured_on)
    console.print(f"Results and plot: {output / 'allreduce'}.json, .png", soft_wrap=True)
    return not failures


def _as_json(
    results: dict[Cluster, list[Figures]],
    versions: dict[str, dict[str, str]],
    machine: dict[str, Any],
    failures: list[dict[str, str]],
) -> dict[str, Any]:
    return {
        "benchmark": "allreduce",
        "versions": versions,
        "machine": machine,
        "rows": [
            {"cluster": str(cluster), **dataclasses.asdict(one)}
            for cluster, figures in results.items()
            for one in figures
        ],
        "ratios": peer_ratios(results),
        "failures": failures,
    }
