"""Progress bar for scheduled functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def drawn_progress(
    counts: Callable[[], Mapping[str, int]], console: Console | None = None
) -> Generator[Callable[[], None]]:
    """Shows a progress bar in a `with` block; yields a function that redraws it.

    `counts` has the keys of `ClosureQueue.counts`. `console` None is stderr; a console that is not
    a terminal shows only the last state.
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
