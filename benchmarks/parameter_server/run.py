"""Runs the benchmark: clusters of processes on this machine, ours beside TensorFlow's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side
from benchmarks.machine import describe_machine
from benchmarks.parameter_server.cases import CASES, OURS, PEER, SCALING, Case, by_cluster
from benchmarks.parameter_server.report import Figures, make_rows, make_table, speedups_of
from benchmarks.plot import draw_ratios
from benchmarks.report import write_json
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_parameter_server"]

# One for each batch of ids, or a few steps: compiles, connects, and tells what a round can hold.
_FIRST_AMOUNT = 8
_MOST_ROUND_S = 1.0


def run_parameter_server(
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
        effort: how often and how long to measure.
        console: of the table.
        output: folder of the results.
        only: cases whose name contains this.
        is_smallest: said by `effort` already.

    Returns:
        Whether all went well.
    """
    cases = [case for case in CASES if only in case.name and (case.is_main or not effort.is_brief)]
    if reason := environments.why_not(PEER):
        console.print(f"Skipped: {PEER.name}: {reason}.")
    results: list[Figures] = []
    versions: dict[str, dict[str, str]] = {}
    failures: list[dict[str, str]] = []
    for group in by_cluster(cases):
        with console.status(f"parameter_server: {group[0].name}") as status:
            try:
                figures, told = _measure(group, environments, effort, status.update)
            except WorkerError as error:
                failures.append({"case": group[0].name, "error": str(error)})
                console.print(f"Failed: {group[0].name}\n{error}", style="red", markup=False)
                continue
        results += figures
        versions |= told
    _write(console, output, results, versions, failures)
    return not failures


def _write(
    console: Console,
    output: Path,
    results: Sequence[Figures],
    versions: dict[str, dict[str, str]],
    failures: list[dict[str, str]],
) -> None:
    rows = make_rows(results)
    found = {one.case: one for one in results}
    ends = [found[case] for case in SCALING if case in found]
    speedups = speedups_of(*ends) if len(ends) == len(SCALING) else []
    machine = describe_machine(None)
    told = {"versions": versions, "machine": machine, "failures": failures}
    scaling = [dataclasses.asdict(one) for one in speedups]
    write_json(
        output / "parameter_server.json",
        {"benchmark": "parameter_server", **told, "rows": rows, "scaling": scaling},
    )
    if rows:
        console.print(make_table(rows))
    for one in speedups:
        console.print(
            f"{one.side}: closures that sleep are {one.factor:.2f} times as fast with "
            f"{one.num_workers} workers as with 1."
        )
    compared = [row for row in rows if "ratio" in row]
    if compared:
        measured_on = f"{machine['cpu']}, {machine['cores']} cores, loopback"
        draw_ratios(output / "parameter_server.png", "parameter_server", compared, measured_on)
    console.print(f"Results and plot: {output / 'parameter_server'}.json, .png", soft_wrap=True)


def _measure(
    cases: Sequence[Case],
    environments: Environments,
    effort: Effort,
    progress: Callable[[str], None],
) -> tuple[list[Figures], dict[str, dict[str, str]]]:
    """Measures cases of one cluster, all sides of which stay until the end."""
    sides = [*dict.fromkeys(OURS[case.kind].module for case in cases if case.kind in OURS)]
    ours = [next(side for side in OURS.values() if side.module == module) for module in sides]
    peers = [PEER] if environments.why_not(PEER) is None else []
    with contextlib.ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        versions: dict[str, dict[str, str]] = {}
        for side in (*ours, *peers):
            progress(f"{side.name} starts")
            worker = stack.enter_context(_started(side, cases[0], environments))
            told = worker.read_answer(effort.start_limit_s)
            workers[side.module] = worker
            versions[side.environment] = told["versions"]
        figures: list[Figures] = []
        for case in cases:
            progress(case.name)
            mine = workers.get(OURS[case.kind].module) if case.kind in OURS else None
            peer = None if case.speed else workers.get(PEER.module)
            asked = [worker for worker in (mine, peer) if worker]
            speeds = iter(_rounds(asked, case, effort) if asked else [])
            figures.append(
                Figures(
                    case,
                    ours=next(speeds) if mine else (),
                    peer=next(speeds) if peer else (),
                )
            )
    return figures, versions


def _started(side: Side, case: Case, environments: Environments) -> WorkerProcess:
    program, flag, module, _ = environments.command(side)
    command = [program, flag, module, json.dumps(dataclasses.asdict(case.cluster))]
    return WorkerProcess(side.name, command, environments.variables(side))


def _rounds(workers: Sequence[WorkerProcess], case: Case, effort: Effort) -> list[list[float]]:
    def ask(worker: WorkerProcess, amount: int) -> dict[str, Any]:
        return worker.ask(case.question(amount), effort.answer_limit_s)

    round_s = min(effort.round_s, _MOST_ROUND_S)
    amounts: list[int] = []
    for worker in workers:
        ask(worker, _FIRST_AMOUNT)
        calls_per_s = _FIRST_AMOUNT / ask(worker, _FIRST_AMOUNT)["seconds"]
        amounts.append(max(_FIRST_AMOUNT, round(round_s * calls_per_s)))
    speeds: list[list[float]] = [[] for _ in workers]
    for number in range(effort.num_rounds):
        for place in order_of_round(len(workers), number):
            told = ask(workers[place], amounts[place])
            speeds[place].append(case.speed_of(amounts[place], told))
    return speeds
