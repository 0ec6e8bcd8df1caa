"""Runs benchmarks: `make bench`, or `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import callbacks, fit_overhead, fit_peers, input, loop, run_overhead
from benchmarks.allreduce import run_allreduce
from benchmarks.cases import Case, Environments, Place, Side
from benchmarks.checkpoint import run_checkpoint
from benchmarks.first_step import run_first_step
from benchmarks.input_service import run_input_service
from benchmarks.machine import describe_machine, load_warning
from benchmarks.overview import draw_overview, read_ratios
from benchmarks.parameter_server import run_parameter_server
from benchmarks.plot import draw_ratios
from benchmarks.recommenders import run_recommenders
from benchmarks.recovery import run_recovery
from benchmarks.report import Form, make_rows, make_table, versions_by_environment, write_json
from benchmarks.runner import Effort, Measurement, measure
from benchmarks.scaling import efficiency
from benchmarks.scaling.pictures import draw_efficiencies
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["BENCHMARKS", "WHOLE", "main"]

BENCHMARKS: dict[str, Callable[[Sequence[Place], Environments], list[Case]]] = {
    "run_overhead": run_overhead.make_cases,
    "fit_overhead": fit_overhead.make_cases,
    "callbacks": callbacks.make_cases,
    "fit_peers": fit_peers.make_cases,
    "loop": loop.make_cases,
    "input": input.make_cases,
    "scaling": efficiency.make_cases,
}
_RATIOS = Form(make_rows, make_table, draw_ratios)
_FORMS = {"scaling": Form(efficiency.make_rows, efficiency.make_table, draw_efficiencies)}
# Benchmarks that compare no sides of training and print tables of their own.
_ONLY_BY_NAME = ("input_service", "recommenders")
WHOLE = {
    "allreduce": run_allreduce,
    "checkpoint": run_checkpoint,
    "first_step": run_first_step,
    "input_service": run_input_service,
    "parameter_server": run_parameter_server,
    "recommenders": run_recommenders,
    "recovery": run_recovery,
}
_WIDTH_OF_A_FILE = 120
_SMALLEST = Effort(num_rounds=1, round_s=0.05)
# What the smallest size runs, where that is less than all, or another case than the first.
_SMALLEST_ONLY = {
    "first_step": "MLP",
    "input_service": "Objects",
    "parameter_server": "empty closures",
    "recommenders": "1 M x 64 keys",
    "recovery": "Stratagem, cold",
    "scaling": "MLP",
}
_ALL_TOGETHER = Effort(num_rounds=3, is_brief=True)


class _Places(click.ParamType):
    name = "places"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Place]:
        try:
            return [Place.parse(text) for text in value.split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1),
    help="If not given, 5, or 3 where all benchmarks run.",
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
    type=_Places(),
    help="Numbers of CPU devices, or gpu: 1,2 and, where there is one, gpu if not given.",
)
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option(
    "--gigabytes",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Size of the state that `checkpoint` saves; the temporary folder needs room for it.",
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
    places: list[Place] | None,
    only: str,
    gigabytes: float,
    peers: Path,
    output: Path,
) -> None:
    """Measures how fast Stratagem is.

    Without a NAME the main cases of all, in short rounds: run_overhead, fit_overhead, callbacks,
    fit_peers, loop, input, scaling, allreduce, checkpoint, first_step, parameter_server, recovery.
    input_service and recommenders need peers of their own: they run only by their names.
    """
    unknown = sorted(set(names) - {*BENCHMARKS, *WHOLE})
    if unknown:
        raise click.UsageError(
            f"No benchmark {', '.join(unknown)}: there is {', '.join((*BENCHMARKS, *WHOLE))}."
        )
    console = _make_console()
    effort = _SMALLEST if smallest else Effort() if names else _ALL_TOGETHER
    if smallest:
        output /= "smallest"  # where it replaces nothing that was measured
    if num_rounds is not None:
        effort = dataclasses.replace(effort, num_rounds=num_rounds)
    environments = Environments(peers=peers)
    accelerator = None if smallest else find_accelerator(environments, effort)
    if places is None:
        places = [Place("cpu", 1), Place("cpu", 2), *([Place("gpu", 1)] if accelerator else [])]
    failed = False
    for name in names or [one for one in (*BENCHMARKS, *WHOLE) if one not in _ONLY_BY_NAME]:
        begin_s = time.monotonic()
        part = only or (_SMALLEST_ONLY.get(name, "") if smallest else "")
        if name in WHOLE:
            arguments = {"size_bytes": int(gigabytes * 1e9)} if name == "checkpoint" else {}
            went_well = WHOLE[name](
                environments, effort, console, output, only=part, is_smallest=smallest, **arguments
            )
        else:
            cases = [
                case
                for case in BENCHMARKS[name](places, environments)
                if part in case.name and (case.is_main or not effort.is_brief)
            ]
            if smallest:
                cases = [_smallest(case, environments, console) for case in cases[:1]]
            results = run_benchmark(name, cases, environments, effort, accelerator, console)
            went_well = _keep(name, results, accelerator, console, output)
        if smallest:
            _mark(name, output)
            console.print("Smallest size: it runs; these figures measure nothing.")
        failed = failed or not went_well
        console.print(f"{name} took {time.monotonic() - begin_s:.0f} s.")
    if not smallest:
        _draw_together(names, console, output)
    if failed:
        raise SystemExit(1)


def _smallest(case: Case, environments: Environments, console: Console) -> Case:
    """Returns a case with short epochs; without the references that are missing."""
    ours = environments.anywhere(case.ours)
    for side in case.references:
        if reason := environments.why_not(side):
            console.print(f"Skipped: {side.name}: {reason}.", markup=False)
    references = environments.references(ours, case.references)
    num_steps = max(side.options.steps_per_call for side in (ours, *references))

    def shortened(side: Side) -> Side:
        options = dataclasses.replace(side.options, steps_per_epoch=num_steps)
        return dataclasses.replace(side, options=options)

    return dataclasses.replace(
        case, ours=shortened(ours), references=tuple(map(shortened, references))
    )


def _mark(name: str, output: Path) -> None:
    """Says in results and plots of the smallest size that they measure nothing."""
    from PIL import Image, ImageDraw

    for path in output.glob(f"{name}*.json"):
        write_json(path, {"is_smallest": True, **json.loads(path.read_text(encoding="utf-8"))})
    for path in output.glob(f"{name}*.png"):
        with Image.open(path) as picture:
            ImageDraw.Draw(picture).text((8, 8), "smallest size: measures nothing", fill="red")
            picture.save(path)


def _make_console() -> Console:
    """Returns where results are printed, after a warning if something else runs."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_A_FILE)
    warning = load_warning(os.getloadavg()[0])
    if warning:
        console.print(f"[bold yellow]{warning}[/]")
    return console


def _keep(
    name: str, results: dict[str, Any], accelerator: str | None, console: Console, output: Path
) -> bool:
    """Writes what was measured; returns True if nothing failed."""
    write_json(output / f"{name}.json", results)
    if results["rows"]:
        machine = results["machine"]
        measured_on = f"{machine['cpu']}, {machine['cores']} cores" + (
            f", {accelerator}" if accelerator else ""
        )
        form = _FORMS.get(name, _RATIOS)
        form.draw(output / f"{name}.png", name, results["rows"], measured_on)
    console.print(f"Results and plot: {output / name}.json, .png", soft_wrap=True)
    return not results["failures"]


def _draw_together(names: Sequence[str], console: Console, output: Path) -> None:
    """Draws the ratios of several benchmarks, also of earlier runs, in one picture."""
    ratios = [] if len(names) == 1 else read_ratios(output)
    if ratios:
        draw_overview(output / "overview.png", ratios)
        console.print(f"All ratios: {output / 'overview.png'}", soft_wrap=True)


def find_accelerator(environments: Environments, effort: Effort) -> str | None:
    """Asks a process of its own which GPU there is, so that this one keeps its hands off it."""
    side = Side(name="probe", module="benchmarks.workers.probe", options=WorkerOptions(workload=""))
    command, variables = environments.command(side), environments.variables(side)
    with WorkerProcess(side.name, command, variables) as worker:
        return worker.read_answer(effort.start_limit_s)["device_kind"] or None


def run_benchmark(
    name: str,
    cases: Sequence[Case],
    environments: Environments,
    effort: Effort,
    accelerator: str | None,
    console: Console,
) -> dict[str, Any]:
    """Measures cases, prints their table and returns what is written to the file."""
    form = _FORMS.get(name, _RATIOS)
    rows: list[dict[str, Any]] = []
    measurements: list[Measurement] = []
    failures: list[dict[str, str]] = []
    machine = describe_machine(accelerator)
    possible, skipped = _leave_out_impossible(cases, environments)
    with Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=len(possible))
        for case in possible:
            try:
                measured = measure(
                    case, environments, effort, lambda text: bar.update(task, description=text)
                )
            except WorkerError as error:
                failures.append({"case": case.name, "error": str(error)})
            else:
                measurements += measured
                rows += form.make_rows(case, measured)
            bar.advance(task)
    console.print(form.make_table(name, rows))
    for left_out in skipped:
        console.print(
            f"Skipped: {left_out['case']}, {left_out['reference_name']}: {left_out['reason']}.",
            markup=False,
        )
    for failure in failures:
        console.print(f"Failed: {failure['case']}\n{failure['error']}", style="red", markup=False)
    return {
        "benchmark": name,
        "versions": versions_by_environment(measurements),
        "machine": machine,
        "rounds": effort.num_rounds,
        "rows": rows,
        "skipped": skipped,
        "failures": failures,
    }


def _leave_out_impossible(
    cases: Sequence[Case], environments: Environments
) -> tuple[list[Case], list[dict[str, str]]]:
    possible: list[Case] = []
    skipped: list[dict[str, str]] = []
    for case in cases:
        references = []
        for side in case.references:
            reason = environments.why_not(side)
            if reason is None:
                references.append(side)
            else:
                skipped.append({"case": case.name, "reference_name": side.name, "reason": reason})
        if references:
            possible.append(dataclasses.replace(case, references=tuple(references)))
    return possible, skipped


if __name__ == "__main__":
    main()
