"""Markdown in the terminal."""

from __future__ import annotations

import click
from rich.console import Console
from rich.markdown import Markdown


def show(text: str) -> None:
    """Prints Markdown: rendered in a terminal with colors, otherwise as it is."""
    console = Console()
    if console.is_terminal and not console.no_color:
        console.print(Markdown(text))
    else:
        click.echo(text.rstrip())
