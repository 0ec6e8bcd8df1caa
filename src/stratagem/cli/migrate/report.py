"""Printed results of a migration: diffs, and a summary with the places left to do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.syntax import Syntax

from stratagem.cli.migrate.files import FileReport, summary


def show_diff(report: FileReport) -> None:
    """Prints the unified diff of a file, colored on a terminal."""
    console = Console()
    if console.is_terminal:
        console.print(Syntax(report.diff(), "diff", background_color="default"))
    else:
        # As it is, so that `patch` can read it.
        console.file.write(report.diff())


def show_summary(reports: Sequence[FileReport], *, written: bool) -> None:
    """Prints totals, places left to do, and files that could not be read; on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for one in reports:
        for line, text in one.marks:
            where = f"{one.path}:{line}" if line else str(one.path)
            console.print(f"{where}: {text}", markup=False)
        if one.error is not None:
            console.print(f"{one.path} stays as it is. {one.error}", markup=False, style="red")
    total = summary(reports)
    verb = "changed" if written else "to change"
    parts = [
        f"{_count(total['files'], 'file')}: {total['changed_files']} {verb}",
        _count(total["changed_lines"], "line"),
        f"{_count(total['left_to_do'], 'place')} left to do",
    ]
    if total["errors"]:
        parts.append(f"{total['errors']} not readable")
    console.print(", ".join(parts) + ".", markup=False)


def as_dict(reports: Sequence[FileReport]) -> dict[str, object]:
    """Returns totals and files as JSON values; files without changes or marks are left out."""
    named = [one for one in reports if one.is_changed or one.marks or one.error]
    return {**summary(reports), "reports": [one.to_dict() for one in named]}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
