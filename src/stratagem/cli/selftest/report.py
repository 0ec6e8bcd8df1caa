"""Progress and table of the self-test."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stratagem.cli.selftest.cases import Case, CaseOutcome, run_case


def run_shown(
    cases: Iterable[Case], console: Console | None = None, *, shows_progress: bool = True
) -> list[CaseOutcome]:
    """Runs cases with a progress bar, prints a table, and returns the outcomes."""
    console = console or Console()
    chosen = list(cases)
    outcomes: list[CaseOutcome] = []
    with Progress(console=console, transient=True, disable=not shows_progress) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.title)
            outcomes.append(run_case(case))
            progress.advance(task)
    table = Table("strategy", "replicas", "difference", "time", "result")
    for outcome in outcomes:
        table.add_row(outcome.case.title, *_cells(outcome))
    console.print(table)
    for outcome in outcomes:
        if outcome.problem and not outcome.is_skipped:
            console.print(f"{outcome.case.title}: {outcome.problem}", markup=False)
    return outcomes


def _cells(outcome: CaseOutcome) -> tuple[str, str, str, str]:
    if outcome.is_skipped:
        return "", "", "", f"[yellow]skipped[/yellow]: {outcome.problem}"
    result = "[green]passed[/green]" if outcome.passed else "[red]failed[/red]"
    difference = outcome.largest_difference
    return (
        str(outcome.num_replicas or ""),
        "" if difference is None else f"{difference:.1e}",
        f"{outcome.wall_s:.1f} s",
        result,
    )
