"""Loops over a growing run folder: one frame, a live terminal, or exports only."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from stratagem.observe.monitoring.terminal_view import frame
from stratagem.observe.monitoring.watcher import Watcher

# Prometheus scrapes once a minute or more often.
_LINGER_S = 60.0


def print_frame(name: str, watcher: Watcher) -> None:
    """Prints one frame; raises NotFoundError without events."""
    state = watcher.poll_existing()
    Console().print(frame(name, state, watcher.account()))


def show(name: str, watcher: Watcher, interval_s: float) -> None:
    """Shows a frame per interval until the run is over; the last one stays."""
    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            state = watcher.poll()
            live.update(frame(name, state, watcher.account()), refresh=True)
            if state.is_over:
                return
            time.sleep(interval_s)


def export(watcher: Watcher, interval_s: float) -> None:
    """Reads new events until the run has been over for a minute, so that its end is scraped."""
    over_s: float | None = None
    while over_s is None or time.monotonic() - over_s < _LINGER_S:
        is_over = watcher.poll().is_over
        if not is_over:
            over_s = None
        elif over_s is None:
            over_s = time.monotonic()
        time.sleep(interval_s)
