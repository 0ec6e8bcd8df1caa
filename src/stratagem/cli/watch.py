"""`stratagem watch`: live view of a run in the terminal, and its exports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


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
    "--prometheus-host",
    default="127.0.0.1",
    show_default=True,
    help="Address for Prometheus; any but loopback needs the secret of the run.",
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
    prometheus_host: str,
    *,
    once: bool,
    as_json: bool,
    opentelemetry: bool,
) -> None:
    """Watch the progress, workers and memory of a run.

    RUN_DIR is the folder with the run's events. It may still be empty. Without a terminal, prints
    one frame. Exits with the run, or on Ctrl-C.
    """
    from stratagem.observe.monitoring import live_view
    from stratagem.observe.monitoring.watcher import Watcher

    watcher = Watcher(run_dir)
    try:
        if opentelemetry:
            from stratagem.observe.monitoring.span_export import SpanExport

            watcher.listeners.append(SpanExport(run_dir).add)
        if prometheus_port is not None:
            from stratagem.cli.prometheus_export import serve

            port, _ = serve(watcher, prometheus_port, prometheus_host)
            click.echo(f"Serving metrics on port {port}, at /metrics.", err=True)
        exports = opentelemetry or prometheus_port is not None
        is_terminal = sys.stdout.isatty()
        if as_json:
            click.echo(json.dumps(watcher.as_dict(watcher.poll_existing()), indent=2))
        elif once or not (is_terminal or exports):
            live_view.print_frame(str(run_dir), watcher)
        elif is_terminal:
            live_view.show(str(run_dir), watcher, interval_s)
        else:
            live_view.export(watcher, interval_s)
    except KeyboardInterrupt:
        return
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
