"""Speed of the working tree beside another revision's, both in turns on one machine.

`make bench-compare BASE=REV`, or `python -m benchmarks.compare REV [NAME ...]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import training
from benchmarks.clusters import allreduce_cases, parameter_server_cases
from benchmarks.report import (
    Interval,
    Verdict,
    bootstrap,
    busy_cores,
    describe_machine,
    paired_ratios,
    write_json,
)
from benchmarks.runner import Effort, WorkerError, measure
from benchmarks.sides import ROOT, Case, Environments, Place, Side

_PLACES = (Place("cpu", 1), Place("cpu", 2))
_CASES: dict[str, Callable[[], list[Case]]] = {
    "run_overhead": lambda: training.run_overhead_cases(_PLACES),
    "fit_overhead": lambda: training.fit_overhead_cases(_PLACES),
    "loop": lambda: training.loop_cases(_PLACES),
    "parameter_server": parameter_server_cases,
    "allreduce": lambda: allreduce_cases(is_compared=True),
}
# Other programs' use of the machine, in cores, above which no verdict is printed.
_QUIET_CORES, _LOOK_S = 0.25, 1.0
_COLORS = {Verdict.HELD: "green", Verdict.BROKEN: "red", Verdict.UNDECIDED: "yellow"}
# Exit codes beyond 0: a case is slower; a process failed; other programs used the machine.
_SLOWER, _FAILED, _LOADED = 1, 3, 4


@dataclasses.dataclass
class Compared:
    """Speeds of one case."""

    case: str  # name
    unit: str  # of the speeds
    # for each tree, ours first, and each start those of its rounds.
    speeds: tuple[list[list[float]], list[list[float]]] = dataclasses.field(
        default_factory=lambda: ([], [])
    )
    # that other programs used while this one was idle, at each start.
    busy_cores: list[float] = dataclasses.field(default_factory=list[float])

    @property
    def interval(self) -> Interval:
        return bootstrap([paired_ratios(*pair) for pair in zip(*self.speeds, strict=True)])

    def row(self) -> dict[str, Any]:
        """Returns what is written to the file."""
        interval = dataclasses.asdict(self.interval)
        ours, base = (statistics.median(itertools.chain(*starts)) for starts in self.speeds)
        return {**dataclasses.asdict(self), "ours": ours, "base": base, **interval}


@click.command()
@click.argument("base")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice([*_CASES]))
@click.option(
    "--bound", default=0.05, show_default=True, help="Part by which a case may be slower."
)
@click.option("--starts", "num_starts", type=click.IntRange(1), default=3, show_default=True)
@click.option("--rounds", "num_rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--round-s", default=0.5, show_default=True, help="Seconds of a round of one side.")
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs", "bench"))
def main(
    base: str,
    names: tuple[str, ...],
    *,
    bound: float,
    num_starts: int,
    only: str,
    output: Path,
    **effort: Any,
) -> None:
    """Measures the working tree beside revision BASE, in turns on this machine.

    Both run in this environment, each with its own files.

    Exits with 1 if a case is slower by more than the bound, 3 if a process failed, and 4 without a
    verdict if other programs used the machine. The interval of a case that is undecided has the
    bound inside it: more starts narrow it.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    cases = [one for name in names or _CASES for one in _CASES[name]() if only in one.name]
    if not cases:
        raise click.UsageError(f"No case contains {only!r}.")
    try:
        commit = commit_of(base)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="BASE") from error
    results: list[Compared] = []
    failures: list[str] = []
    with _checked_out(commit) as folder, console.status("compare"):
        for case in cases:
            name = f"{case.ours.name} at {commit[:10]}"
            base_side = dataclasses.replace(case.ours, name=name, folder=folder)
            try:
                for one in _compare(case, base_side, Effort(**effort), num_starts):
                    console.print(f"{one.case}: {one.interval.ratio:.3f}", markup=False)
                    results.append(one)
            except WorkerError as error:
                failures.append(f"{case.name}: {error}")
    is_quiet = (
        max((cores for one in results for cores in one.busy_cores), default=0) <= _QUIET_CORES
    )
    console.print(_table(results, base, bound, is_judged=is_quiet))
    rows = [one.row() for one in results]
    told = {"base": base, "bound": bound, "machine": describe_machine(), "rows": rows}
    write_json(output / "compare.json", {**told, "failures": failures})
    for failure in failures:
        console.print(f"Failed: {failure}", style="red", markup=False)
    if not is_quiet and not failures:
        console.print(
            f"No verdict: other programs used more than {_QUIET_CORES:g} cores between the starts. "
            "Stop them, and compare again.",
            style="yellow",
        )
    raise SystemExit(exit_code(results, failures, bound, is_quiet=is_quiet))


def exit_code(
    results: Sequence[Compared], failures: Sequence[str], bound: float, *, is_quiet: bool
) -> int:
    if failures:
        return _FAILED
    if not is_quiet:
        return _LOADED
    is_slower = any(one.interval.verdict(bound) is Verdict.BROKEN for one in results)
    return _SLOWER if is_slower else 0


def _compare(case: Case, base: Side, effort: Effort, num_starts: int) -> list[Compared]:
    """Measures our side of a case in both trees, with new processes for each start."""
    found: dict[str, Compared] = {}
    for start in range(num_starts):
        busy = busy_cores(_LOOK_S)
        # The other one is started first the next time.
        first, second = (base, case.ours) if start % 2 else (case.ours, base)
        turned = dataclasses.replace(case, ours=first, references=(second,), prepared=None)
        for task, measured in measure(turned, Environments(), effort):
            (figure,) = task.figures.values()
            name = ": ".join(filter(None, (case.name, task.name)))
            one = found.setdefault(name, Compared(name, task.unit))
            one.busy_cores.append(busy)
            for speeds, side in zip(one.speeds, measured[:: -1 if start % 2 else 1], strict=True):
                speeds.append(side.figures(figure))
    return [*found.values()]


def _table(results: Sequence[Compared], base: str, bound: float, *, is_judged: bool) -> Table:
    """Returns a row for each case; without verdicts after a run under load."""
    table = Table(title=f"Speed of the working tree relative to {base}", title_justify="left")
    table.add_column("case")
    for header in ("unit", "ours", "base", "ratio", "95% interval"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column(f"at most {bound:.0%} slower?", no_wrap=True)
    for one in results:
        row, verdict = one.row(), one.interval.verdict(bound)
        table.add_row(
            one.case,
            one.unit,
            f"{row['ours']:,.4g}",
            f"{row['base']:,.4g}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"[{_COLORS[verdict]}]{verdict.value}[/]" if is_judged else "not judged",
        )
    return table


def commit_of(revision: str) -> str:
    """Returns the hash of a commit, branch or tag."""
    found = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode:
        raise ValueError(
            f"{revision!r} is no revision of this repository. Expected: a commit, branch or tag. "
            "Fix: `git fetch` it first, or choose one that `git log` lists."
        )
    return found.stdout.strip()


@contextlib.contextmanager
def _checked_out(commit: str) -> Generator[Path]:
    """Yields the tree of a commit in a temporary Git worktree."""
    with tempfile.TemporaryDirectory(prefix="stratagem-base-") as parent:
        folder = Path(parent) / commit[:12]
        _git("worktree", "add", "--detach", "--quiet", str(folder), commit, check=True)
        try:
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


if __name__ == "__main__":
    main()
