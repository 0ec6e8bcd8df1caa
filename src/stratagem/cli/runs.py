"""Commands that read the folder of a run or its traces: watch, report, goodput, profile."""

from __future__ import annotations

import hmac
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stratagem import environment
from stratagem.cli.commands import json_option, print_json
from stratagem.environment import load
from stratagem.group.authentication.secret import required_secret
from stratagem.observe.goodput.account import Account
from stratagem.observe.monitoring.run_state import Phase, RunSnapshot, Watcher

if TYPE_CHECKING:
    from prometheus_client.core import Metric


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
def watch_command(
    run_dir: Path,
    interval_s: float,
    prometheus_port: int | None,
    prometheus_host: str,
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Watch the progress, workers and memory of a run.

    RUN_DIR is the folder with the run's events. It may still be empty. Without a terminal, prints
    one frame. Exits with the run, or on Ctrl-C.
    """
    from stratagem.observe.monitoring import terminal_view as live_view

    watcher = Watcher(run_dir)
    try:
        if prometheus_port is not None:
            port, _ = serve(watcher, prometheus_port, prometheus_host)
            click.echo(f"Serving metrics on port {port}, at /metrics.", err=True)
        is_terminal = sys.stdout.isatty()
        if as_json:
            print_json(watcher.as_dict(watcher.poll_existing()))
        elif once or not (is_terminal or prometheus_port is not None):
            live_view.print_frame(str(run_dir), watcher)
        elif is_terminal:
            live_view.show(str(run_dir), watcher, interval_s)
        else:
            live_view.export(watcher, interval_s)
    except KeyboardInterrupt:
        return
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; RUN_DIR/report.html by default.",
)
def report_command(run_dir: Path, output: Path | None) -> None:
    """Write a report of a run as an HTML file.

    The file needs no network. RUN_DIR is the folder with the run's events.
    """
    from stratagem.observe.monitoring.html_report import write_report

    output = output or run_dir / "report.html"
    try:
        write_report(run_dir, output)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Wrote {output}.")


@click.command("goodput")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also plot it: FILE.png."
)
@json_option
def goodput_command(run_dir: Path, plot: Path | None, *, as_json: bool) -> None:
    """Show a run's useful time, and where the rest went.

    RUN_DIR is the folder with the run's events.
    """
    from stratagem.observe import goodput
    from stratagem.observe.goodput import report

    try:
        account = goodput.account_for(goodput.read_run(run_dir))
        if plot is not None:
            report.draw(account, plot)
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print_json(account.as_dict())
        return
    report.show(account)


@click.command("profile")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(0), default=10, help="Operations to show.")
@json_option
def profile_command(trace: Path, top: int, *, as_json: bool) -> None:
    """Show what the time of profiled training steps was spent on.

    TRACE is the folder given to sg.profile or jax.profiler.start_trace, or an .xplane.pb file in
    it. The latest profile of each worker counts.
    """
    # Reading needs no accelerator.
    environment.set_defaults({"JAX_PLATFORMS": "cpu"})
    try:
        from stratagem.observe.profiling.recorder import read_profiles
        from stratagem.observe.profiling.summary import show_profile

        summaries = read_profiles(trace)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        found = [{"trace": str(path), **one.to_dict(top)} for path, one in summaries.items()]
        print_json(found)
        return
    for path, summary in summaries.items():
        show_profile(summary, _title(path, trace), top=top)


def _title(path: Path, folder: Path) -> str:
    """Returns the part of a path that tells workers apart."""
    parts = path.relative_to(folder).parts if path != folder else ()
    return parts[0] if len(parts) > 1 and parts[0] != "plugins" else path.name


# Metrics of a run for Prometheus, computed from its folder at each scrape.

PURPOSE = "telemetry"
"""Purpose of the key whose hexadecimal digits are the token of a scrape."""
_IDLE_S = 10.0

_NEEDS = {"needed_by": "The export to Prometheus", "install": "'stratagem[observe]'"}
_Samples = Iterable[tuple[list[str], float | None]]


class RunCollector:
    """A collector of `prometheus_client`: each scrape reads new events, and nothing else runs."""

    def __init__(self, watcher: Watcher) -> None:
        self._core: Any = load("prometheus_client.core", **_NEEDS)
        self._watcher = watcher

    def describe(self) -> list[Any]:
        """Returns no names, so that a registration needs no scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; unknown values are left out."""
        state, account = self._watcher.poll(), self._watcher.account()
        for name, meaning, labels, samples in (*_of_run(state), *_of_account(account)):
            family = self._core.GaugeMetricFamily(f"stratagem_{name}", meaning, labels=labels)
            for texts, value in samples:
                if value is not None:
                    family.add_metric(texts, value)
            if family.samples:
                yield family


def _of_run(state: RunSnapshot) -> Iterator[tuple[str, str, list[str], _Samples]]:
    for name, meaning, value in (
        ("step", "Number of completed steps.", state.step),
        ("total_steps", "Steps after which training ends.", state.total_steps),
        ("steps_per_second", "Speed over the last ten seconds of steps.", state.steps_per_s),
        ("restarts", "Restarts of this launch.", state.num_restarts),
        ("members", "Workers of an elastic group.", state.num_members),
        ("expected_members", "Workers of a full elastic group.", state.num_expected),
        ("warnings", "Recorded warnings.", state.num_warnings),
    ):
        yield name, meaning, [], [([], value)]
    values = [([name], math.nan if one is None else one) for name, one in state.values.items()]
    yield "metric", "Latest loss and metrics, by name.", ["name"], values
    phases = [task.phase for task in state.tasks]
    counts = [([phase.value], phases.count(phase.value)) for phase in Phase]
    yield "processes", "Number of processes in each state.", ["state"], counts
    for name, meaning, field in (
        ("last_heard_seconds", "Seconds since the last event of a process.", "heard_s"),
        ("step_delay_seconds", "Time that a worker holds up each step.", "delay_s"),
        ("host_memory_bytes", "Resident memory.", "host_bytes"),
        ("device_memory_bytes", "Memory in use on the fullest device.", "device_bytes"),
    ):
        found = [([task.task], getattr(task, field)) for task in state.tasks]
        yield name, meaning, ["process"], found
    late = [([one.task, one.cause], one.late_s) for one in state.tasks if one.cause is not None]
    meaning = "Time of each step that the others wait for a slow worker."
    yield "waited_for_seconds", meaning, ["process", "cause"], late


def _of_account(account: Account | None) -> Iterator[tuple[str, str, list[str], _Samples]]:
    if account is None:
        return
    after, whole = account.goodput_after_startup, account.goodput
    for name, meaning, value in (
        ("goodput_after_startup_ratio", "Useful share of the wall time without start-up.", after),
        ("goodput_with_startup_ratio", "Useful share of all wall time.", whole),
        ("failures", "Failures of the run.", len(account.failures)),
    ):
        yield name, meaning, [], [([], value)]
    times = [([cause], time_s) for cause, time_s in account.time_s.items()]
    yield "time_seconds", "Wall time by cause.", ["cause"], times


def serve(watcher: Watcher, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Serves the metrics in threads of this process; returns the port, and a function to stop.

    If there is a secret, a scrape needs the token made from it. Raises ImportError without
    `prometheus_client`, OSError if the port is taken, ValueError as `required_secret`.
    """
    client: Any = load("prometheus_client", **_NEEDS)
    secret = required_secret("The export to Prometheus", [host])
    registry = client.CollectorRegistry()
    server, thread = client.start_http_server(port, host, registry)
    server.RequestHandlerClass.timeout = _IDLE_S  # without it, an idle connection holds a thread
    metrics = server.get_app()
    expected = "" if secret is None else f"Bearer {secret.key(PURPOSE).hex()}"

    def answer(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = request.get("HTTP_AUTHORIZATION", "").encode()
        if expected and not hmac.compare_digest(given, expected.encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"The token is printed by: stratagem secret --telemetry\n"]
        return metrics(request, start)

    server.set_app(answer)
    # The server runs already: a scrape that came before the line above found nothing.
    registry.register(RunCollector(watcher))

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
