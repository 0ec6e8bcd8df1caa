"""`stratagem watch`: live view of a run in the terminal, and its exports."""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import sys
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stratagem.environment import load
from stratagem.group.authentication.secret import required_secret
from stratagem.observe.goodput.account import Account
from stratagem.observe.monitoring.run_state import Phase, RunSnapshot, Watcher

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


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
    from stratagem.observe.monitoring import terminal_view as live_view
    from stratagem.observe.monitoring.run_state import Watcher

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
            live_view.show(str(run_dir), watcher, interval_s)
        else:
            live_view.export(watcher, interval_s)
    except KeyboardInterrupt:
        return
    except (ImportError, LookupError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


# Metrics of a run for Prometheus, computed from its folder at each scrape.

PURPOSE = "telemetry"
"""Purpose of the key whose hexadecimal digits are the token of a scrape."""
_MAX_CONNECTIONS = 32

_NEEDS = {"needed_by": "The export to Prometheus", "install": "'stratagem[observe]'"}


class _ScrapeHandler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = 10.0  # of each read: an idle connection is closed

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a scrape comes every few seconds."""


class _MetricsServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """A thread per connection, up to a limit; further ones are closed."""

    daemon_threads = True

    def __init__(self, place: tuple[str, int], handler: type[_ScrapeHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and frees the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class RunCollector:
    """A collector of `prometheus_client`: each scrape reads new events, and nothing else runs."""

    def __init__(self, watcher: Watcher) -> None:
        self._core: Any = load("prometheus_client.core", **_NEEDS)
        self._watcher = watcher

    def describe(self) -> list[Any]:
        """Returns no names, so that a registration needs no scrape."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields all metrics; unknown ones are left out."""
        state = self._watcher.poll()
        account = self._watcher.account()
        yield from self._of_run(state)
        yield from self._of_tasks(state)
        if account is not None:
            yield from self._of_account(account)

    def _of_run(self, state: RunSnapshot) -> Iterator[GaugeMetricFamily]:
        yield from self._single("step", "Number of completed steps.", state.step)
        yield from self._single(
            "total_steps", "Steps after which training ends.", state.total_steps
        )
        yield from self._single(
            "steps_per_second", "Speed over the last ten seconds of steps.", state.steps_per_s
        )
        yield from self._single("restarts", "Restarts of this launch.", state.num_restarts)
        yield from self._single("members", "Workers of an elastic group.", state.num_members)
        yield from self._single(
            "expected_members", "Workers of a full elastic group.", state.num_expected
        )
        yield from self._single("warnings", "Recorded warnings.", state.num_warnings)
        values = (([name], value) for name, value in state.values.items())
        yield self._family(
            "metric",
            "Latest loss and metrics, by name.",
            ["name"],
            [(labels, float("nan") if value is None else value) for labels, value in values],
        )

    def _of_tasks(self, state: RunSnapshot) -> Iterator[GaugeMetricFamily]:
        phases = [task.phase for task in state.tasks]
        yield self._family(
            "processes",
            "Number of processes in each state.",
            ["state"],
            [([phase.value], float(phases.count(phase.value))) for phase in Phase],
        )
        for name, meaning, field in (
            ("last_heard_seconds", "Seconds since the last event of a process.", "heard_s"),
            ("step_delay_seconds", "Time that a worker holds up each step.", "delay_s"),
            ("host_memory_bytes", "Resident memory.", "host_bytes"),
            ("device_memory_bytes", "Memory in use on the fullest device.", "device_bytes"),
        ):
            found = [([task.task], getattr(task, field)) for task in state.tasks]
            yield self._family(name, meaning, ["process"], found)
        late = [task for task in state.tasks if task.cause is not None]
        yield self._family(
            "waited_for_seconds",
            "Time of each step that the others wait for a slow worker.",
            ["process", "cause"],
            [([task.task, task.cause or ""], task.late_s) for task in late],
        )

    def _of_account(self, account: Account) -> Iterator[GaugeMetricFamily]:
        yield from self._single(
            "goodput_after_startup_ratio",
            "Useful share of the wall time without start-up.",
            account.goodput_after_startup,
        )
        yield from self._single(
            "goodput_with_startup_ratio", "Useful share of all wall time.", account.goodput
        )
        yield from self._single("failures", "Failures of the run.", len(account.failures))
        yield self._family(
            "time_seconds",
            "Wall time by cause.",
            ["cause"],
            [([cause], time_s) for cause, time_s in account.time_s.items()],
        )

    def _single(self, name: str, meaning: str, value: float | None) -> Iterator[GaugeMetricFamily]:
        if value is not None:
            yield self._family(name, meaning, [], [([], value)])

    def _family(
        self,
        name: str,
        meaning: str,
        labels: list[str],
        samples: Iterable[tuple[list[str], float | None]],
    ) -> GaugeMetricFamily:
        family = self._core.GaugeMetricFamily(f"stratagem_{name}", meaning, labels=labels)
        for texts, value in samples:
            if value is not None:
                family.add_metric(texts, value)
        return family


def serve(watcher: Watcher, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Serves the metrics in threads of this process; returns the port, and a function to stop.

    If there is a secret, a scrape needs the token made from it. Raises ImportError without
    `prometheus_client`, OSError if the port is taken, ValueError as `required_secret`.
    """
    client: Any = load("prometheus_client", **_NEEDS)
    secret = required_secret("The export to Prometheus", [host])
    registry = client.CollectorRegistry()
    registry.register(RunCollector(watcher))
    metrics = client.make_wsgi_app(registry)
    expected = "" if secret is None else f"Bearer {secret.key(PURPOSE).hex()}"

    def answer(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = request.get("HTTP_AUTHORIZATION", "").encode()
        if expected and not hmac.compare_digest(given, expected.encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"The token is printed by: stratagem secret --telemetry\n"]
        return metrics(request, start)

    server = _MetricsServer((host, port), _ScrapeHandler)
    server.set_app(answer)
    thread = threading.Thread(target=server.serve_forever, name="stratagem-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
