"""Findings as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratagem.cli.doctor.finding import Finding

_SIGNS = {
    "ok": "[green]✓[/green]",
    "note": "[blue]i[/blue]",
    "warning": "[yellow]![/yellow]",
    "error": "[red]✗[/red]",
}


def show(findings: Iterable[Finding]) -> list[Finding]:
    """Prints findings as they come, under the heading of their topic, and returns them."""
    console = Console(highlight=False)
    signs = _SIGNS if console.encoding.lower().startswith("utf") else dict.fromkeys(_SIGNS, "-")
    shown: list[Finding] = []
    for finding in findings:
        if not shown or shown[-1].topic != finding.topic:
            console.print(f"[bold]{finding.topic}[/bold]")
        _print(console, signs[finding.level], escape(finding.text))
        if finding.fix:
            _print(console, " ", f"[dim]Fix:[/dim] {escape(finding.fix)}")
        shown.append(finding)
    counts = {level: sum(one.level == level for one in shown) for level in ("error", "warning")}
    words = (f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())
    console.print(", ".join(words))
    return shown


def _print(console: Console, sign: str, text: str) -> None:
    """Prints a line; a terminal wraps it below itself, a file has it in one."""
    if not console.is_terminal:
        console.print(f"  {sign} {text}", soft_wrap=True)
        return
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(f"  {sign}", text)
    console.print(line)
