"""Runs the benchmark: a state that steps change, saved behind training and not, and restored."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, Side, whole_side
from benchmarks.checkpoint.report import (
    Figures,
    draw_stalls,
    make_restore_table,
    make_table,
    peer_ratios,
)
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["SIDES", "run_checkpoint"]

_SMALLEST_SIZE_BYTES, _BRIEF_SIZE_BYTES = 10**6, 250 * 10**6
_NUM_ROUNDS = 5


SIDES = (
    whole_side("Stratagem", "stratagem_checkpoint"),
    whole_side("Orbax by hand", "orbax_checkpoint"),
    whole_side("PyTorch DCP", "torch_checkpoint", environment="peers"),
)


def run_checkpoint(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
    size_bytes: int = 10**9,
) -> bool:
    """Measures, prints a table and writes figures and plot.

    Args:
        environments: where the sides run.
        effort: how long to wait, and how often to measure; a brief one takes at most 250 MB.
        console: of the table.
        output: folder of the results.
        only: sides whose name contains this.
        is_smallest: a state of 1 MB.
        size_bytes: of the state; the disk needs room for it once.

    Returns:
        Whether all went well.
    """
    if is_smallest or effort.is_brief:
        size_bytes = min(size_bytes, _SMALLEST_SIZE_BYTES if is_smallest else _BRIEF_SIZE_BYTES)
    num_rounds = min(effort.num_rounds, _NUM_ROUNDS)
    results: list[Figures] = []
    versions: dict[str, Any] = {}
    failures: list[dict[str, str]] = []
    for side in SIDES:
        if only not in side.name:
            continue
        if reason := environments.why_not(side):
            console.print(f"Skipped: {side.name}: {reason}.")
            continue
        with console.status(side.name):
            try:
                figures, found = _measure(side, size_bytes, num_rounds, environments, effort)
            except WorkerError as error:
                failures.append({"case": side.name, "error": str(error)})
                console.print(f"Failed: {side.name}\n{error}", style="red", markup=False)
                continue
        results.append(figures)
        versions[side.name] = found
    told = {"size_bytes": size_bytes, "rounds": num_rounds, "versions": versions}
    _write(console, output, results, told, failures)
    return not failures


def _write(
    console: Console,
    output: Path,
    results: list[Figures],
    told: dict[str, Any],
    failures: list[dict[str, str]],
) -> None:
    machine = describe_machine(None)
    has_ours = bool(results) and results[0].name == SIDES[0].name
    write_json(
        output / "checkpoint.json",
        {
            "benchmark": "checkpoint",
            **told,
            "machine": machine,
            "rows": [dataclasses.asdict(one) for one in results],
            "ratios": peer_ratios(results) if has_ours else [],
            "failures": failures,
        },
    )
    if results:
        size_bytes = told["size_bytes"]
        console.print(make_table(size_bytes, results))
        console.print(make_restore_table(size_bytes, results))
        measured_on = f"{machine['cpu']}, {machine['cores']} cores"
        draw_stalls(output / "checkpoint.png", size_bytes, results, measured_on)
    console.print(f"Results and plot: {output / 'checkpoint'}.json, .png", soft_wrap=True)


def _measure(
    side: Side, size_bytes: int, num_rounds: int, environments: Environments, effort: Effort
) -> tuple[Figures, dict[str, str]]:
    program, flag, module, _ = environments.command(side)
    found: dict[str, str] = {}

    def rounds(*, is_async: bool) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Returns the first round, with the peaks of memory, and the others."""
        options = json.dumps({"bytes": size_bytes, "is_async": is_async})
        command = [program, flag, module, options]
        with (
            tempfile.TemporaryDirectory() as folder,
            WorkerProcess(side.name, command, environments.variables(side)) as worker,
        ):
            found.update(worker.read_answer(effort.start_limit_s)["versions"])
            question = {"folder": f"{folder}/saved", "is_async": is_async}
            first, *others = [
                worker.ask({**question, "memory": index == 0}, effort.answer_limit_s)
                for index in range(1 + num_rounds)
            ]
        return first, others

    first_now, now = rounds(is_async=False)
    first_behind, behind = rounds(is_async=True)
    figures = Figures(
        side.name, _medians(now), _medians(behind), first_now, first_behind, now, behind
    )
    return figures, found


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
