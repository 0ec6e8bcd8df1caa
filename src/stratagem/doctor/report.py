"""Findings as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from stratagem.doctor.finding import Finding

__all__ = ["show"]

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
        console.print(f"  {signs[finding.level]} {escape(finding.text)}")
        if finding.fix:
            console.print(f"    [dim]Fix:[/dim] {escape(finding.fix)}")
        shown.append(finding)
    counts = {level: sum(one.level == level for one in shown) for level in ("error", "warning")}
    console.print(f"{counts['error']} errors, {counts['warning']} warnings")
    return shown
