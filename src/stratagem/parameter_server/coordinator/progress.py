"""Progress bar of the scheduled functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["drawn_progress"]


@contextlib.contextmanager
def drawn_progress(
    counts: Callable[[], Mapping[str, int]], console: Console | None = None
) -> Generator[Callable[[], None]]:
    """Draws a bar for the time of a `with` block.

    Args:
        counts: returns how many functions are queued, waiting, running, and done since the
            beginning.
        console: where it is drawn; None for stderr. One that is no terminal gets the last state.

    Yields:
        What draws the state of now.
    """
    done_before = counts()["done"]
    columns = (
        TextColumn("functions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    screen = console or Console(stderr=True)
    with Progress(*columns, console=screen, auto_refresh=False) as progress:
        task = progress.add_task("", total=None, running=0)

        def draw() -> None:
            now = counts()
            done = now["done"] - done_before
            total = done + now["queued"] + now["waiting"] + now["running"]
            progress.update(task, completed=done, total=total, running=now["running"], refresh=True)

        draw()
        try:
            yield draw
        finally:
            draw()
