"""`stratagem watch`: live view of a run in the terminal, and its exports."""

from __future__ import annotations

import hmac
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stratagem.environment import load
from stratagem.group.authentication.secret import required_secret
from stratagem.observe.goodput import Account
from stratagem.observe.run_state import Phase, RunSnapshot, Watcher

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
def command(
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
    from stratagem.observe import terminal as live_view
    from stratagem.observe.run_state import Watcher

    watcher = Watcher(run_dir)
    try:
        if prometheus_port is not None:
            port, _ = serve(watcher, prometheus_port, prometheus_host)
            click.echo(f"Serving metrics on port {port}, at /metrics.", err=True)
        is_terminal = sys.stdout.isatty()
        if as_json:
            click.echo(json.dumps(watcher.as_dict(watcher.poll_existing()), indent=2))
        elif once or not (is_terminal or prometheus_port is not None):
            live_view.print_frame(str(run_dir), watcher)
        elif is_terminal:
            live_view.show_live(str(run_dir), watcher, interval_s)
        else:
            live_view.export(watcher, interval_s)
    except KeyboardInterrupt:
        return
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


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
    ):
        yield name, meaning, [], [([], value)]
    values = [([name], math.nan if one is None else one) for name, one in state.values.items()]
    yield "metric", "Latest loss and metrics, by name.", ["name"], values
    phases = [task.phase for task in state.tasks]
    counts = [([phase.value], phases.count(phase.value)) for phase in Phase]
    yield "processes", "Number of processes in each state.", ["state"], counts
    for name, meaning, field in (
        ("last_heard_seconds", "Seconds since the last event of a process.", "heard_s"),
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
