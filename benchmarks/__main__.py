"""Runs benchmarks: `make bench`, or `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import training
from benchmarks.checkpoint import checkpoint
from benchmarks.clusters import (
    allreduce_cases,
    input_service_cases,
    parameter_server_cases,
    recommenders_cases,
)
from benchmarks.first_step import first_step
from benchmarks.recovery import recovery
from benchmarks.report import describe_machine, draw, draw_together, make_table, write_json
from benchmarks.runner import Effort, Run
from benchmarks.sides import Case, Environments, Place

_WIDTH_OF_A_FILE, _QUIET_LOAD = 160, 0.5
_SMALLEST = Effort(num_rounds=1, round_s=0.05, is_smallest=True)
_ALL_TOGETHER = Effort(num_rounds=3, is_brief=True)
# They need peers of their own.
_ONLY_BY_NAME = ("input_service", "recommenders")


def _trained(make_cases: Callable[[tuple[Place, ...]], list[Case]]) -> Callable[[Run], None]:
    def measure(run: Run) -> None:
        cases = make_cases(tuple(run.places))
        run.compare_all([*map(training.shortened, cases)] if run.effort.is_smallest else cases)

    return measure


BENCHMARKS: dict[str, Callable[[Run], None]] = {
    "run_overhead": _trained(training.run_overhead_cases),
    "fit_overhead": _trained(training.fit_overhead_cases),
    "fit_peers": _trained(training.fit_peers_cases),
    "loop": _trained(training.loop_cases),
    "input": _trained(training.input_cases),
    "scaling": training.scaling,
    "allreduce": lambda run: run.compare_all(allreduce_cases(is_brief=run.effort.is_brief)),
    "checkpoint": checkpoint,
    "first_step": first_step,
    "parameter_server": lambda run: run.compare_all(parameter_server_cases()),
    "recovery": recovery,
    "input_service": lambda run: run.compare_all(
        input_service_cases(is_smallest=run.effort.is_smallest)
    ),
    "recommenders": lambda run: run.compare_all(
        recommenders_cases(is_smallest=run.effort.is_smallest)
    ),
}


def _places(context: Any, option: Any, text: str) -> list[Place]:
    words = [word.strip() for word in text.split(",")]
    if not all(word == "gpu" or (word.isdecimal() and int(word)) for word in words):
        raise click.BadParameter(
            f"{text!r} is no place to run. Expected: numbers of CPU devices, or gpu. "
            'For example "1,2,gpu".'
        )
    return [Place("gpu", 1) if word == "gpu" else Place("cpu", int(word)) for word in words]


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1),
    help=f"If not given, {Effort.num_rounds}, or {_ALL_TOGETHER.num_rounds} where all run.",
)
@click.option(
    "--smallest",
    is_flag=True,
    help="One case, one short round, into the folder `smallest` of the results: shows that it "
    "runs, and measures nothing.",
)
@click.option(
    "--devices",
    "places",
    callback=_places,
    default="1,2",
    show_default=True,
    help="Numbers of CPU devices, or gpu.",
)
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option(
    "--gigabytes",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="State that `checkpoint` saves: three sides hold one, and the disk needs room for one.",
)
@click.option(
    "--peers",
    type=click.Path(path_type=Path),
    default=Environments.peers,
    help="Interpreter that has the other frameworks; that of .venv-peers if not given.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("runs", "bench"),
    help="Folder of the results.",
)
def main(
    names: tuple[str, ...],
    num_rounds: int | None,
    smallest: bool,
    places: list[Place],
    only: str,
    gigabytes: float,
    peers: Path,
    output: Path,
) -> None:
    """Measures how fast Stratagem is.

    Without a NAME the main cases of all, in short rounds: run_overhead, fit_overhead, fit_peers,
    loop, input, scaling, allreduce, checkpoint, first_step, parameter_server, recovery.
    input_service and recommenders need peers of their own: they run only by their names.
    """
    if unknown := sorted(set(names) - {*BENCHMARKS}):
        raise click.UsageError(
            f"No benchmark {', '.join(unknown)}: there is {', '.join(BENCHMARKS)}."
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_A_FILE)
    if (load := os.getloadavg()[0]) > _QUIET_LOAD:
        console.print(
            f"The load of this machine is {load:.1f}: something else runs, and the figures are not "
            "to be trusted.",
            style="bold yellow",
        )
    effort = _SMALLEST if smallest else Effort() if names else _ALL_TOGETHER
    if num_rounds is not None:
        effort = dataclasses.replace(effort, num_rounds=num_rounds)
    if smallest:
        output /= "smallest"  # where it replaces nothing that was measured
    has_failed = False
    for name in names or [one for one in BENCHMARKS if one not in _ONLY_BY_NAME]:
        begin_s = time.monotonic()
        run = Run(
            name,
            Environments(peers=peers),
            effort,
            console,
            only=only,
            places=places,
            size_bytes=int(gigabytes * 1e9),
        )
        BENCHMARKS[name](run)
        _keep(run, output)
        has_failed = has_failed or bool(run.failures)
        console.print(f"{name} took {time.monotonic() - begin_s:.0f} s.")
    if not smallest and len(names) != 1 and draw_together(output / "overview.png", output):
        console.print(f"All ratios: {output / 'overview.png'}", soft_wrap=True)
    if has_failed:
        raise SystemExit(1)


def _keep(run: Run, output: Path) -> None:
    """Prints the table of a benchmark, and writes its results and its picture."""
    machine = describe_machine()
    told = {
        "benchmark": run.name,
        "versions": run.versions,
        "machine": machine,
        "rounds": run.effort.num_rounds,
        "is_smallest": run.effort.is_smallest,
        "rows": run.rows,
        "skipped": run.skipped,
        "failures": run.failures,
    }
    write_json(output / f"{run.name}.json", told)
    if run.rows:
        run.console.print(make_table(run.name, run.rows))
        is_smallest = ", smallest size: measures nothing" if run.effort.is_smallest else ""
        title = f"{run.name}{is_smallest}\n{machine['cpu']}, {machine['cores']} cores"
        draw(output / f"{run.name}.png", run.rows, title)
    if run.effort.is_smallest:
        run.console.print("Smallest size: it runs; these figures measure nothing.")
    run.console.print(f"Results and plot: {output / run.name}.json, .png", soft_wrap=True)


if __name__ == "__main__":
    main()
