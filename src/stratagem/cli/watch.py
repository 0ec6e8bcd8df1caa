"""`stratagem watch`: live view of a run in the terminal, and its exports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from stratagem.monitoring.watcher import Watcher

__all__ = ["command"]


@click.command("watch")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one frame as JSON and exit.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between frames.",
)
@click.option(
    "--prometheus-port",
    type=click.IntRange(0, 65535),
    help="Serve the run's metrics to Prometheus on this port; 0 takes a free one.",
)
@click.option(
    "--opentelemetry",
    is_flag=True,
    help="Export events as spans, through the provider that OTEL_* variables configure.",
)
def command(
    run_dir: Path,
    interval_s: float,
    prometheus_port: int | None,
    *,
    once: bool,
    as_json: bool,
    opentelemetry: bool,
) -> None:
    """Watch a run: progress, loss, workers, goodput, memory and warnings.

    RUN_DIR is the folder with the run's events. It may still be empty. Without a terminal, prints
    one frame. Exits with the run, or on Ctrl-C.
    """
    from stratagem.monitoring.watcher import Watcher

    watcher = Watcher(run_dir)
    try:
        if opentelemetry:
            from stratagem.monitoring.span_export import SpanExport

            watcher.listeners.append(SpanExport(run_dir).add)
        if prometheus_port is not None:
            from stratagem.monitoring.prometheus_export import serve

            port = serve(watcher, prometheus_port)
            click.echo(f"Serving metrics on port {port}, at /metrics.", err=True)
        exports = opentelemetry or prometheus_port is not None
        if as_json or once:
            _print_once(run_dir, watcher, as_json=as_json)
        elif exports and not click.get_text_stream("stdout").isatty():
            _follow(watcher, interval_s)
        else:
            _show(run_dir, watcher, interval_s)
    except KeyboardInterrupt:
        return
    except (ImportError, LookupError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _print_once(run_dir: Path, watcher: Watcher, *, as_json: bool) -> None:
    from rich.console import Console

    from stratagem.monitoring.terminal_view import frame

    state = watcher.poll()
    watcher.check()
    if as_json:
        click.echo(json.dumps(watcher.as_dict(state), indent=2))
    else:
        Console().print(frame(str(run_dir), state, watcher.account()))


def _follow(watcher: Watcher, interval_s: float, linger_s: float = 60.0) -> None:
    """Exports until the run has been over for a minute, so that its last figures are scraped."""
    over_s: float | None = None
    while over_s is None or time.monotonic() - over_s < linger_s:
        is_over = watcher.poll().is_over
        over_s = (over_s or time.monotonic()) if is_over else None
        time.sleep(interval_s)


def _show(run_dir: Path, watcher: Watcher, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from stratagem.monitoring.terminal_view import frame

    console = Console()
    if not console.is_terminal:
        _print_once(run_dir, watcher, as_json=False)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            state = watcher.poll()
            live.update(frame(str(run_dir), state, watcher.account()), refresh=True)
            if state.is_over:
                return
            time.sleep(interval_s)
