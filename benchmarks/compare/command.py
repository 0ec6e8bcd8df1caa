"""The command: `make bench-compare BASE=REV`, or `python -m benchmarks.compare REV`."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import fit_overhead, loop, run_overhead
from benchmarks.allreduce.run import CLUSTERS, SIZES_BYTES
from benchmarks.cases import Environments, Place
from benchmarks.compare.intervals import Verdict
from benchmarks.compare.report import QUIET_CORES, is_quiet, make_table, rows_of
from benchmarks.compare.revisions import HEAD, check_out, commit_of
from benchmarks.compare.rounds import Compared, Plan, compare_subject
from benchmarks.compare.subjects import ServerSubject, Subject, SumSubject, TrainingSubject
from benchmarks.machine import describe_machine
from benchmarks.parameter_server import cases as server_cases
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError

__all__ = ["compare", "subjects_of"]

_TRAINING = {
    "run_overhead": run_overhead.make_cases,
    "fit_overhead": fit_overhead.make_cases,
    "loop": loop.make_cases,
}
NAMES = (*_TRAINING, "parameter_server", "allreduce")
# A larger sum takes seconds, and its speed is the memory's.
_MOST_SUMMED_BYTES = 2**24
_WIDTH_OF_A_FILE = 120
# Exit codes beyond 0: a case is slower; a process failed; other programs used the machine.
_SLOWER, _FAILED, _LOADED = 1, 3, 4


@click.command()
@click.argument("base")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(NAMES))
@click.option(
    "--bound", default=0.05, show_default=True, help="Part by which a case may be slower."
)
@click.option("--starts", "num_starts", type=click.IntRange(1), default=3, show_default=True)
@click.option("--rounds", "num_rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--round-s", default=0.5, show_default=True, help="Seconds of a round of one side.")
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs", "bench"))
def compare(
    base: str,
    names: tuple[str, ...],
    bound: float,
    num_starts: int,
    num_rounds: int,
    round_s: float,
    only: str,
    output: Path,
) -> None:
    """Measures the working tree beside revision BASE, in turns on this machine.

    Both run in this environment, each with its own files.

    Exits with 1 if a case is slower by more than the bound, 3 if a process failed, and 4 without a
    verdict if other programs used the machine. The interval of a case that is undecided has the
    bound inside it: more starts narrow it.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_A_FILE)
    effort = Effort(num_rounds=num_rounds, round_s=round_s)
    results: list[Compared] = []
    failures: list[str] = []
    subjects = subjects_of(names or NAMES, only)
    if not subjects:
        raise click.UsageError(f"No case contains {only!r}.")
    try:
        commit = commit_of(base)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="BASE") from error
    with check_out(commit) as tree, _progress(console) as bar:
        plan = Plan((HEAD, tree), Environments(), effort, num_starts)
        task = bar.add_task("", total=len(subjects))
        for subject in subjects:
            try:
                results += compare_subject(
                    subject,
                    plan,
                    lambda text: bar.update(task, description=text),
                    lambda line: bar.console.print(line, markup=False),
                )
            except WorkerError as error:
                failures.append(f"{subject.cases[0]}: {error}")
            bar.advance(task)
    console.print(make_table(results, base, bound))
    machine = describe_machine(None)
    rows = rows_of(results)
    told = {"base": base, "bound": bound, "machine": machine, "rows": rows, "failures": failures}
    write_json(output / "compare.json", told)
    for failure in failures:
        console.print(f"Failed: {failure}", style="red", markup=False)
    raise SystemExit(_exit_code(results, failures, bound, console))


def _exit_code(results: list[Compared], failures: list[str], bound: float, console: Console) -> int:
    if failures:
        return _FAILED
    if not is_quiet(results):
        console.print(
            f"No verdict: other programs used more than {QUIET_CORES:g} cores between the starts. "
            "Stop them, and compare again.",
            style="yellow",
        )
        return _LOADED
    is_slower = any(one.interval.verdict(bound) is Verdict.BROKEN for one in results)
    return _SLOWER if is_slower else 0


def subjects_of(names: tuple[str, ...], only: str = "") -> list[Subject]:
    """Returns the work of benchmarks by name, with cases whose name contains `only`."""
    places = [Place("cpu", 1), Place("cpu", 2)]
    subjects: list[Subject] = []
    for name in names:
        if name in _TRAINING:
            cases = _TRAINING[name](places, Environments())
            subjects += [TrainingSubject(case) for case in cases if only in case.name]
        elif name == "parameter_server":
            chosen = [one for one in server_cases.CASES if only in one.name]
            groups = itertools.groupby(
                chosen, lambda one: (one.cluster, server_cases.OURS[one.kind].module)
            )
            subjects += [ServerSubject(tuple(group)) for _, group in groups]
        else:
            sizes = tuple(size for size in SIZES_BYTES if size <= _MOST_SUMMED_BYTES)
            subjects += [SumSubject(one, sizes) for one in CLUSTERS if only in str(one)]
    return subjects


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        TextColumn("compare"), *columns, TextColumn("{task.description}"), console=console
    )
