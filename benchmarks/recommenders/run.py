"""Runs the benchmark: a table on processes of this machine, ours beside each peer."""

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
from benchmarks.plot import draw_ratios
from benchmarks.recommenders.cases import Comparison, by_options
from benchmarks.recommenders.report import Figures, make_rows, make_table, median_of
from benchmarks.report import write_json
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_recommenders"]

_FIRST_AMOUNT = 4
_CHECKED_IDS = 1_000
_KINDS = ("pull", "step")


def run_recommenders(
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
        only: tables and peers whose title contains this.
        is_smallest: a small table, and few ids.

    Returns:
        Whether all went well.
    """
    figures: list[Figures] = []
    versions: dict[str, dict[str, str]] = {}
    failures: list[dict[str, str]] = []
    for one in by_options(only, is_smallest=is_smallest):
        if reason := environments.why_not(one.peer):
            console.print(f"Skipped: {one.title}: {reason}.")
            if not is_smallest:
                continue
            (peer,) = environments.references(one.sides[0], [])
            one = dataclasses.replace(one, peer=peer)
        with console.status(f"recommenders: {one.title}") as status:
            try:
                figures += _measure(one, environments, effort, versions, status.update, is_smallest)
            except WorkerError as error:
                failures.append({"case": one.title, "error": str(error)})
                console.print(f"Failed: {one.title}\n{error}", style="red", markup=False)
    rows, machine = make_rows(figures), describe_machine(None)
    told = {"versions": versions, "machine": machine, "failures": failures, "rows": rows}
    write_json(output / "recommenders.json", {"benchmark": "recommenders", **told})
    if rows:
        console.print(make_table(rows))
        measured_on = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}"
        draw_ratios(output / "recommenders.png", "recommenders", rows, measured_on)
    console.print(f"Results and plot: {output / 'recommenders'}.json, .png", soft_wrap=True)
    return not failures


def _measure(
    one: Comparison,
    environments: Environments,
    effort: Effort,
    versions: dict[str, dict[str, str]],
    progress: Callable[[str], None],
    is_smallest: bool,
) -> list[Figures]:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_started(side, one, environments)) for side in one.sides]
        limit_s = effort.answer_limit_s
        row_bytes: list[float] = []
        for side, worker in zip(one.sides, workers, strict=True):
            progress(f"{one.title}: {side.name} fills its table")
            told = worker.read_answer(limit_s)["versions"]
            versions.setdefault(side.environment, {}).update(told)
            worker.ask({"kind": "check", "num_ids": _CHECKED_IDS}, limit_s)
            row_bytes.append(worker.ask({"kind": "memory"}, limit_s)["row_bytes"])
        figures: list[Figures] = []
        for kind in _KINDS:
            for num_ids in one.num_ids(is_smallest=is_smallest):
                progress(f"{one.title}: {kind}, {num_ids:,} ids")
                question = {"kind": kind, "num_ids": num_ids}
                amount, told = _rounds(workers, question, effort)
                figures.append(
                    Figures(
                        one.name,
                        one.peer.name,
                        kind,
                        num_ids,
                        per_s=_both(
                            [amount * num_ids / round_["seconds"] for round_ in side]
                            for side in told
                        ),
                        cpu_s=_both(median_of(side, "cpu_s", amount) for side in told),
                        sent_bytes=_both(median_of(side, "sent_bytes", amount) for side in told),
                        row_bytes=_both(row_bytes),
                    )
                )
    return figures


def _both(values: Any) -> Any:
    ours, peer = values
    return ours, peer


def _started(side: Side, one: Comparison, environments: Environments) -> WorkerProcess:
    program, flag, module, _ = environments.command(side)
    command = [program, flag, module, json.dumps(one.arguments())]
    return WorkerProcess(side.name, command, environments.variables(side))


def _rounds(
    workers: Sequence[WorkerProcess], question: dict[str, Any], effort: Effort
) -> tuple[int, list[list[dict[str, float]]]]:
    """Returns the calls of a round, the same for both sides, and what each said of each round."""
    limit_s = effort.answer_limit_s
    slowest_s = 0.0
    for worker in workers:
        worker.ask({**question, "amount": _FIRST_AMOUNT}, limit_s)
        told = worker.ask({**question, "amount": _FIRST_AMOUNT}, limit_s)
        slowest_s = max(slowest_s, told["seconds"] / _FIRST_AMOUNT)
    amount = max(_FIRST_AMOUNT, round(effort.round_s / slowest_s))
    told_by_side: list[list[dict[str, float]]] = [[] for _ in workers]
    for number in range(effort.num_rounds):
        for place in order_of_round(len(workers), number):
            answer = workers[place].ask({**question, "amount": amount}, limit_s)
            told_by_side[place].append(answer)
    return amount, told_by_side
