"""Plain tables."""

from __future__ import annotations

from stratagem.cli.tables import show_table


def test_cells_are_shown_as_they_are(capsys) -> None:
    show_table(("name", "value"), [("a", "[bold]1[/bold]"), ("b", "-")])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        ["a", "[bold]1[/bold]"],
        ["b", "-"],
    ]
